"""The stage `partition`: rows -> centroids -> K clusters, one shard of rows for each, and a report of them.

N rows of a part, D dimensions of what is clustered, K clusters.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np

from ddm_ray.data import OnProgress, no_progress, phase
from ddm_ray.data.partition.assignment import assign_rows
from ddm_ray.data.partition.clustering import Clustering, RowsReader, fit
from ddm_ray.data.partition.file_plan import FILE_BYTES, FilePlan
from ddm_ray.data.partition.made_files import MadeFiles, clear_records
from ddm_ray.data.partition.numbers import sizes
from ddm_ray.data.partition.passes import EachPart, in_turn
from ddm_ray.data.partition.report import begin_report, build_report, commit_report, read_clustering, report
from ddm_ray.data.partition.shards import ShardWriter, commit_made
from ddm_ray.data.partition.state import SHARDS, ExpectedShard, check_finished, invalidate, manifest_key
from ddm_ray.data.schema import trains
from ddm_ray.data.scratch import scratch_folder
from ddm_ray.errors import ConfigError, CorruptArtifact, DataError, DriftError
from ddm_ray.storage.graph import CENTROIDS, PARTITION, ROWS, Artifact, owner_rows, shard, shards_of
from ddm_ray.storage.info import CentroidsInfo, PartitionInfo, ShardInfo
from ddm_ray.storage.manifest import NAME, FileRecord, Identity, Manifest, sha256
from ddm_ray.storage.run import Run

if TYPE_CHECKING:
    from ddm_ray.data.partition.ray_data import RayPasses


def partition(
    run: Run,
    progress: OnProgress | None = None,
    cluster: int | None = None,
    scratch: str | None = None,
    with_report: bool = True,
    execute: "RayPasses | None" = None,
) -> Manifest:
    """Make the shards, then the artifact `partition`, then its report; a no-op if all are finished.

    `execute`: has a Ray cluster do it; none: this process does.

    `cluster`: where shards are given, make this owner's shard alone, of its own rows. `scratch`: a local folder that
    takes about what the shards do (none: the system's temporary one). Memory: the k-means sample, some parts of the
    rows and a shard's file. The same rows give the same bytes, also where this runs twice at once. Raises DataError
    if a cluster would have no training row, ConfigError, MissingArtifact, CorruptArtifact, DriftError, StorageError.
    """
    on_progress = progress or no_progress
    given, num_clusters = run.config.partition.given, run.config.partition.num_clusters
    if cluster is not None:
        if not given:
            method = run.config.partition.method
            raise ConfigError(f"cluster is for shards that are given: partition.method is {method}")
        if not 0 <= cluster < num_clusters:
            last = num_clusters - 1
            raise ConfigError(f"cluster {cluster}: partition.num_clusters is {num_clusters}, so 0 to {last}")
        return _own(run, cluster, on_progress, scratch)
    manifest = _collect(run, on_progress) if given else _partition(run, on_progress, scratch, with_report, execute)
    if with_report:
        report(run, on_progress)
    return manifest


def _partition(
    run: Run, on_progress: OnProgress, scratch: str | None, with_report: bool, execute: "RayPasses | None"
) -> Manifest:
    """The partition, and perhaps its report, whose builder sees all rows as this process sorts them."""
    finished = run.finished(PARTITION)
    identity = run.identity(PARTITION)
    clusters = range(run.config.partition.num_clusters)
    listed = {cluster: finished.files[manifest_key(shard(cluster))] if finished else None for cluster in clusters}

    def expected(cluster: int, centroids: str | None) -> ExpectedShard:
        return ExpectedShard(run, cluster, centroids, identity, listed[cluster])

    if finished:
        check_finished(run, finished)
        if all(expected(cluster, None).finished() for cluster in clusters):
            return finished
        with_report = False  # one that is missing is made of all rows, once the shards are whole
    rows, each = RowsReader(run, ROWS), execute.each if execute else in_turn
    with scratch_folder(scratch) as folder, execute.session() if execute else nullcontext():
        clustering, centroids = _centroids(rows, identity, phase(on_progress, 0.0, 0.4, "centroids"), each)
        earlier = phase(on_progress, 0.0, 0.4, "report")  # rows that are appended have no centroids to fit
        builder = begin_report(run, clustering, earlier) if with_report and not execute else None
        digest = centroids.digest if centroids else None
        shards = {cluster: expected(cluster, digest).finished() for cluster in clusters}
        kept = {cluster: manifest for cluster, manifest in shards.items() if manifest}
        missing = [cluster for cluster in clusters if cluster not in kept]
        for cluster in missing:
            expected(cluster, digest).invalidate()
        for name in run.store.folders(f"{PARTITION}/{SHARDS}"):
            if f"{PARTITION}/{SHARDS}/{name}" not in shards_of(run.config):
                run.store.delete_one(f"{PARTITION}/{SHARDS}/{name}/{NAME}")
        assigned = assign_rows(rows, clustering, phase(on_progress, 0.4, 0.6, "clusters"), each)
        sorting, counts = phase(on_progress, 0.6, 0.8, "sorting"), (assigned.rows_train_K, assigned.rows_heldout_K)
        if execute:
            plan, made = FilePlan(run.config.data, *counts, missing, FILE_BYTES), MadeFiles(run, digest, FILE_BYTES)
            files = execute.write(rows, assigned.clusters, plan, made, sorting)
            for cluster in missing:
                under = run.identity(shard(cluster))
                kept[cluster] = commit_made(ExpectedShard(run, cluster, digest, under, listed[cluster]), plan, files)
        else:
            with ShardWriter(run, *counts, missing, folder / "shards", FILE_BYTES) as writer:
                for table in rows.parts(None, sorting):
                    cluster_N = assigned.clusters(table)
                    writer.add(table, cluster_N)
                    if builder:
                        builder.add(table, cluster_N, assigned.distances(table, cluster_N))
                for done, cluster in enumerate(missing):
                    on_progress(0.8 + 0.18 * done / len(missing), f"shard {cluster}")
                    kept[cluster] = writer.commit(cluster, digest, listed[cluster])
    clear_records(run)
    if finished:
        _require_listed(run, finished, {cluster: kept[cluster] for cluster in missing})
        return finished
    manifest = _commit(run, [kept[cluster] for cluster in clusters], centroids, identity)
    if builder:
        on_progress(0.98, "report")
        commit_report(run, build_report(builder, manifest, rows, assigned.clustering))
    _show_sizes(manifest, on_progress)
    return manifest


def _centroids(
    rows: RowsReader, identity: Identity, on_progress: OnProgress, each: EachPart
) -> tuple[Clustering | None, Manifest | None]:
    """The artifact of the centroids, as an interrupted partition left it or new, for the methods that have one."""
    run = rows.run
    if not run.config.partition.by_kmeans:
        return None, None
    invalidate(run, CENTROIDS, lambda: _kept_centroids(run, identity))
    if kept := _kept_centroids(run, identity):
        return kept
    if run.appends and run.base:
        before = run.base.require(CENTROIDS)
        [name] = before.files
        data, info = run.base.read(CENTROIDS, name, before), CentroidsInfo.of(before)
    else:
        clustering, num_sampled = fit(rows, on_progress, each)
        data = clustering.to_bytes()
        info = CentroidsInfo(rows_sampled=num_sampled, num_fine=len(clustering.centroids.fine_FD))
    # Named by its content, since a concurrent writer's may be other bits, from another machine.
    name = f"centroids-{sha256(data)[:8]}.safetensors"
    run.store.write(f"{CENTROIDS}/{name}", data)
    records = {name: FileRecord.of(data)}
    manifest = run.commit_records(CENTROIDS, records, info, identity=identity)
    for other in run.store.sizes(CENTROIDS).keys() - manifest.files.keys() - {NAME}:
        run.store.delete_one(f"{CENTROIDS}/{other}")
    return read_clustering(run, manifest), manifest


def _kept_centroids(run: Run, identity: Identity) -> tuple[Clustering, Manifest] | None:
    try:
        manifest = run.manifest(CENTROIDS)
        if manifest and not run.drift(CENTROIDS, manifest.identity, identity):
            return read_clustering(run, manifest), manifest
    except CorruptArtifact:
        return None
    return None


def _require_listed(run: Run, partition: Manifest, remade: Mapping[int, Manifest]) -> None:
    """Raises CorruptArtifact unless the shards that were made again are those that a finished partition lists."""
    for cluster, manifest in remade.items():
        listed = partition.files[manifest_key(shard(cluster))]
        if sha256(manifest.to_json()) != listed.sha256:
            ExpectedShard(run, cluster, None, partition.identity, listed).invalidate()
            raise CorruptArtifact(
                f"{run.url}/{shard(cluster)}: made again it isn't what the partition lists", run.remake(PARTITION)
            )


def _commit(run: Run, shards: Sequence[Manifest], centroids: Manifest | None, identity: Identity) -> Manifest:
    """Commit the partition. Its files are its parts' manifests, so that its digest stands for every row's place."""
    fitted = CentroidsInfo.of(centroids) if centroids else None
    info = partition_info([ShardInfo.of(manifest) for manifest in shards], fitted)
    parts = [*shards, centroids] if centroids else shards
    records = {manifest_key(Artifact(part.artifact)): FileRecord.of(part.to_json()) for part in parts}
    return run.commit_records(PARTITION, records, info, identity=identity)


def partition_info(shards: Sequence[ShardInfo], centroids: CentroidsInfo | None) -> PartitionInfo:
    """The numbers of a partition that follow from its parts' manifests, the shards by cluster."""
    counts_CK = np.array([info.counts_C for info in shards], np.int64).T
    train_K = np.array([info.rows_train for info in shards], np.int64)
    heldout_K = np.array([info.rows_heldout for info in shards], np.int64)
    networks = {part: fingerprint for info in shards for part, fingerprint in info.networks.items()}
    num_fine = centroids.num_fine if centroids else None
    return PartitionInfo(**sizes(counts_CK, train_K, heldout_K), num_fine=num_fine, networks=networks)


def _own(run: Run, cluster: int, on_progress: OnProgress, scratch: str | None) -> Manifest:
    """One owner's shard, of its own rows alone."""
    run.finished(shard(cluster))  # raises DriftError
    if finished := ExpectedShard(run, cluster, None, run.identity(shard(cluster))).finished():
        return finished
    rows = RowsReader(run, owner_rows(cluster))
    with scratch_folder(scratch) as folder:
        counts_2K = np.zeros((2, run.config.partition.num_clusters), np.int64)
        for table in rows.parts([], phase(on_progress, 0.0, 0.3, "counting")):
            train = int(trains(table).sum())
            counts_2K[:, cluster] += (train, table.num_rows - train)
        if not counts_2K[0, cluster]:
            raise DataError(
                f"{run.url}/{owner_rows(cluster)}: has no training row; prepare more, or use a lower data.heldout"
            )
        with ShardWriter(run, counts_2K[0], counts_2K[1], [cluster], folder / "shards") as writer:
            for table in rows.parts(None, phase(on_progress, 0.3, 0.8, "sorting")):
                writer.add(table, np.full(table.num_rows, cluster))
            on_progress(0.8, f"shard {cluster}")
            manifest = writer.commit(cluster, None)
    on_progress(1.0, f"{ShardInfo.of(manifest).rows_train:,} training rows")
    return manifest


def _collect(run: Run, on_progress: OnProgress) -> Manifest:
    """The partition of given shards, from their manifests alone. Raises DriftError if one was replaced since."""
    finished = run.finished(PARTITION)
    shards = shards_of(run.config)
    if finished:
        check_finished(run, finished)
        for artifact in shards:
            manifest = run.manifest(artifact)
            if manifest and sha256(manifest.to_json()) != finished.files[manifest_key(artifact)].sha256:
                raise DriftError(
                    f"{run.url}/{PARTITION} was made of another {manifest_key(artifact)}",
                    run.remake(PARTITION, delete=f"{run.url}/{PARTITION}/{NAME}"),
                )
        return finished
    manifests = {artifact: run.require(artifact) for artifact in shards}
    num_classes = len(run.config.data.class_names)
    networks: dict[str, str] = {}
    for artifact, manifest in manifests.items():
        info = ShardInfo.of(manifest)
        for part, own in info.networks.items():
            if networks.setdefault(part, own) != own:
                raise DataError(
                    f"{run.url}/{artifact}: its rows were made with another {part} ({own}) than another owner's"
                    f" ({networks[part]}): all need the same files",
                    run.make(artifact),
                )
        counted = len(info.counts_C)
        if counted != num_classes:
            raise DataError(
                f"{run.url}/{artifact}: counts {counted} classes, this run has {num_classes}; its owner makes it"
                " anew, in a run of this configuration",
                run.make(artifact),
            )
    manifest = _commit(run, list(manifests.values()), None, run.identity(PARTITION))
    _show_sizes(manifest, on_progress)
    return manifest


def _show_sizes(partition: Manifest, on_progress: OnProgress) -> None:
    rows_K = PartitionInfo.of(partition).rows_K
    on_progress(1.0, f"{len(rows_K)} clusters of {min(rows_K):,} to {max(rows_K):,} training rows")
