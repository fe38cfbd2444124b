"""Groups of clusters that one set of rows is divided into: all clusters of a run, or those that changed together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from ddm_ray.config.derive import NEAREST
from ddm_ray.core.kmeans import Centroids
from ddm_ray.data import OnProgress, phase
from ddm_ray.data.columns import read_columns
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition.assignment import Assigned, assign_rows
from ddm_ray.data.partition.clustering import Clustering, RowsReader, fit_clustering
from ddm_ray.data.partition.file_plan import FILE_BYTES, FilePlan
from ddm_ray.data.partition.made_files import MadeFiles
from ddm_ray.data.partition.passes import Executor, FileWork
from ddm_ray.data.partition.shards import write_shards
from ddm_ray.data.partition.state import ExpectedShard
from ddm_ray.errors import ConfigError, MissingArtifact
from ddm_ray.run.graph import CENTROIDS, ROWS, Artifact, rows_of_shard, shard
from ddm_ray.run.info import CentroidsInfo, ShardInfo
from ddm_ray.run.inheriting import generation_of
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import Run

STAYED = "stayed where they were prepared, so the cluster can't be split: derive the run from one that has them"


@dataclass(frozen=True)
class Group:
    """The numbers of clusters that rows are divided into; their places are those in `clusters`.

    `rows`: the run and the artifact of the rows. `parent`: the base and its cluster that is split into these clusters,
    or None. `appended`: the rows join others that the clusters have. `balanced`: in sizes, by `max_share`.
    """

    clusters: tuple[int, ...]
    rows: tuple[Run, Artifact]
    parent: tuple[Run, int] | None = None
    appended: bool = False
    balanced: bool = False

    @cached_property
    def reader(self) -> RowsReader:
        """The rows, as they are when first asked for. Raises MissingArtifact, DriftError, CorruptArtifact."""
        run, artifact = self.rows
        return RowsReader(run, artifact) if self.parent is None else RowsOfShard(*self.parent)

    def make(
        self,
        run: Run,
        clustering: Clustering | None,
        missing: dict[int, ExpectedShard],
        on_progress: OnProgress,
        execute: Executor,
    ) -> tuple[dict[int, Manifest], Assigned]:
        """Write the missing shards, by their places. `clustering`: of these clusters. Raises as `assign_rows`."""
        for each in missing.values():
            each.invalidate()
        rows = self.reader
        assigned = assign_rows(
            rows,
            clustering,
            phase(on_progress, 0.0, 0.3, "clusters"),
            execute,
            len(self.clusters),
            self.balanced,
            self.appended,
        )
        counts = (assigned.rows_train_K, assigned.rows_heldout_K)
        plan = FilePlan(run.config.data, *counts, list(missing), FILE_BYTES)
        made = MadeFiles(run, missing, FILE_BYTES, self.clusters)
        work = FileWork(rows, assigned.clusters, plan, made)
        manifests = write_shards(work, missing, phase(on_progress, 0.3, 1.0), execute)
        made.clear()
        return manifests, assigned


def groups_that_change(run: Run) -> list[Group]:
    """The groups of clusters that aren't the base's, of a run with clusters that change one by one."""
    config, changes = run.config, run.config.changes
    base = run.base or run
    groups = [Group(each.clusters, (run, rows_of_shard(config, shard(each.clusters[0]))[0])) for each in changes.joined]
    for parent, children in changes.split.items():
        behind = rows_behind(base, parent)
        if not behind:
            raise MissingArtifact(f"{base.url}/{shard(parent)}: its rows {STAYED}")
        holder, artifact, _ = behind[0]
        groups.append(Group(children, (holder, artifact), (base, parent)))
    if changes.appended:
        others = tuple(cluster for cluster in config.partition.clusters if cluster not in changes.made)
        groups.append(Group(others, (run, ROWS), appended=True))
    return groups


def nearest_cluster(run: Run, cluster: int) -> int:
    """The number of the base's cluster that has its centroid nearest to that of a new cluster."""
    partition, made = run.config.partition, run.config.changes.made
    clusters, position = partition.clusters, partition.position
    coarse_KD = Clustering.read(run, run.require(CENTROIDS)).centroids.coarse_KD
    distance_K = np.linalg.norm(coarse_KD - coarse_KD[position(cluster)], axis=1)
    like = run.config.expert_of(cluster).model, run.config.flow_of(cluster)
    begun = {*made, *(each for each in clusters if _begins_as_nearest(run, each))}
    alike = [
        each
        for each in clusters
        if each not in begun and (run.config.expert_of(each).model, run.config.flow_of(each)) == like
    ]
    if not alike:
        raise ConfigError(f"{run.url}: no expert has the network of expert {cluster}, so none is the nearest")
    return min(alike, key=lambda each: distance_K[position(each)])


def _begins_as_nearest(run: Run, cluster: int) -> bool:
    init = run.config.expert_of(cluster).train.init_from
    return init is not None and init.network == NEAREST


def restricted(clustering: Clustering, places: list[int]) -> Clustering:
    """The centroids of some clusters, by their places."""
    every, of = clustering.centroids, np.array(places)
    fine_F = np.isin(every.fine_to_coarse_F, of)
    place_of = np.full(len(every.coarse_KD), -1)
    place_of[of] = np.arange(len(of))
    some = Centroids(every.fine_FD[fine_F], every.coarse_KD[of], place_of[every.fine_to_coarse_F[fine_F]])
    return replace(clustering, centroids=some)


def changed_clustering(
    run: Run, groups: Sequence[Group], on_progress: OnProgress, execute: Executor
) -> tuple[Clustering, int]:
    """The centroids of a run with clusters that change one by one: the base's, and those of new clusters' rows.

    Also the number of rows that k-means saw.
    """
    base = run.base or run
    before = Clustering.read(base, base.require(CENTROIDS))
    parts = {cluster: (before, place) for place, cluster in enumerate(base.config.partition.clusters)}
    sampled = CentroidsInfo.of(base.require(CENTROIDS)).rows_sampled
    made = [group for group in groups if not group.appended]
    for number, group in enumerate(made):
        within = phase(on_progress, number / len(made), (number + 1) / len(made))
        fit, rows = fit_clustering(group.reader, within, execute, len(group.clusters), before.features)
        parts |= {cluster: (fit, place) for place, cluster in enumerate(group.clusters)}
        sampled += rows
    together = _joined(parts, run.config.partition.clusters)
    return Clustering(before.features, together), sampled


def _joined(parts: dict[int, tuple[Clustering, int]], clusters: tuple[int, ...]) -> Centroids:
    """The centroids of clusters in their order, each from its place in a clustering of several."""
    fine, coarse, fine_to_coarse = [], [], []
    for place, cluster in enumerate(clusters):
        of, where = parts[cluster]
        own_F = of.centroids.fine_to_coarse_F == where
        fine.append(of.centroids.fine_FD[own_F])
        coarse.append(of.centroids.coarse_KD[where])
        fine_to_coarse.append(np.full(int(own_F.sum()), place))
    return Centroids(np.concatenate(fine), np.stack(coarse), np.concatenate(fine_to_coarse))


class RowsOfShard(RowsReader):
    """The rows of one cluster of a run with their embeddings, out of all rows that its shard was made from."""

    def __init__(self, run: Run, cluster: int):
        """Raises MissingArtifact for rows that stayed behind, DriftError, CorruptArtifact."""
        self.run, self._cluster = run, cluster
        behind = rows_behind(run, cluster)
        self._readers = [RowsReader(holder, artifact) for holder, artifact, _ in behind]
        self._keys = [np.sort(_keys_of(run, cluster, generation)) for _, _, generation in behind]
        self.sizes = {
            f"{number}:{name}": size for number, one in enumerate(self._readers) for name, size in one.sizes.items()
        }
        info = ShardInfo.of(run.require(shard(cluster)))
        self.num_train = info.rows_train
        num_rows = sum(len(table) for name in self.names for table in [self.read(name, ["id", "split"])])
        if num_rows != info.rows:
            raise MissingArtifact(
                f"{run.url}/{shard(cluster)} has {info.rows:,} rows, of which {num_rows:,} are among the rows with"
                f" embeddings; the others {STAYED}"
            )

    def read(self, name: str, columns: list[str] | None) -> pa.Table:
        """See RowsReader."""
        number, _, part = name.partition(":")
        table, own_N = self._readers[int(number)].read(part, columns), self._keys[int(number)]
        if not len(own_N):
            return table.slice(0, 0)
        key_N = shuffle_keys(table["id"].to_pylist())
        place_N = np.searchsorted(own_N, key_N).clip(max=len(own_N) - 1)
        return table.filter(pa.array(own_N[place_N] == key_N))


def rows_behind(run: Run, cluster: int) -> list[tuple[Run, Artifact, int | None]]:
    """The rows that a cluster's shard was made from: the runs that have them, and their artifacts.

    Also the generation of the shard's files that came from them, as images of two sources may have equal ids; None: all
    files, in a cluster that was split from another.
    """
    while run.base is not None and run.inherits(shard(cluster)):
        run = run.base
    changes = run.config.changes
    for parent, children in changes.split.items():
        if cluster in children:
            return [(holder, artifact, None) for holder, artifact, _ in rows_behind(run.base or run, parent)]
    before = rows_behind(run.base, cluster) if run.base and changes.appended and cluster not in changes.made else []
    own = [(run, artifact, changes.generation) for artifact in rows_of_shard(run.config, shard(cluster))]
    # Of a cluster that was split, files aren't told apart by their generation, nor are those that joined it later.
    mixed = any(generation is None for _, _, generation in before)
    return [*before, *((holder, artifact, None if mixed else number) for holder, artifact, number in own)]


def _keys_of(run: Run, cluster: int, generation: int | None) -> np.ndarray:
    """Shuffle keys of a shard's rows, of its files of one generation or of all."""
    artifact = shard(cluster)
    manifest, keys = run.require(artifact), [np.empty(0, np.uint64)]
    for name in manifest.files:
        if name.endswith(".parquet") and generation in (None, generation_of(f"{artifact}/{name}")):
            keys.append(shuffle_keys(read_columns(run, artifact, name, manifest, ["id"])["id"].to_pylist()))
    return np.concatenate(keys)
