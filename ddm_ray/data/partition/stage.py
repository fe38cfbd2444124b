"""The stage `partition`: rows -> centroids -> K clusters, a shard of rows for each, and a report of them.

N rows of a part, D dimensions of what is clustered, K clusters.
"""

from collections.abc import Sequence

from ddm_ray.data import OnProgress, no_progress, phase
from ddm_ray.data.partition.clustering import Clustering, fit_clustering
from ddm_ray.data.partition.groups import Group, changed_clustering, groups_that_change, restricted
from ddm_ray.data.partition.made_files import FOLDER
from ddm_ray.data.partition.numbers import partition_info
from ddm_ray.data.partition.passes import Executor, InProcess
from ddm_ray.data.partition.report import report, report_of
from ddm_ray.data.partition.state import (
    SHARDS,
    ExpectedShard,
    check_finished,
    has_centroids,
    invalidate,
    manifest_key,
)
from ddm_ray.data.prepare.stage import rows_artifact
from ddm_ray.errors import ConfigError, CorruptArtifact, DataError, DriftError
from ddm_ray.remedies import Make
from ddm_ray.run.graph import CENTROIDS, PARTITION, ROWS, Artifact, owner_rows, shard, shards_of
from ddm_ray.run.info import CentroidsInfo, PartitionInfo, ShardInfo
from ddm_ray.run.manifest import NAME, FileRecord, Identity, Manifest, sha256
from ddm_ray.run.run import Run


def partition(
    run: Run,
    progress: OnProgress | None = None,
    cluster: int | None = None,
    with_report: bool = True,
    execute: Executor | None = None,
) -> Manifest:
    """Make the shards, then the artifact `partition`, then its report. A no-op if all are finished.

    `cluster`: if shards are given, make only this owner's shard, from its own rows. `execute`: None runs everything in
    this process. Memory: the k-means sample, some parts of the rows, and files of about a GiB. The same rows give the
    same bytes, also in two concurrent calls. Raises DataError if a cluster would have no training row, ConfigError,
    MissingArtifact, CorruptArtifact, DriftError, StorageError, RayError.
    """
    on_progress, execute = progress or no_progress, execute or InProcess()
    if cluster is not None:
        rows_artifact(run, cluster)
        if not run.config.partition.given:
            raise ConfigError(f"{run.url}: all clusters are made together, as shards aren't given; leave cluster out")
        return _own(run, cluster, on_progress, execute)
    given = run.config.partition.given
    manifest = _collect(run, on_progress) if given else _partition(run, on_progress, with_report, execute)
    if with_report:
        report(run, on_progress, execute)
    return manifest


def _partition(run: Run, on_progress: OnProgress, with_report: bool, execute: Executor) -> Manifest:
    """The partition of a run, with its report unless this only remakes shards of a finished partition."""
    finished = run.finished(PARTITION)
    changed = run.config.changes.of_clusters
    clusters = run.config.partition.clusters
    groups = groups_that_change(run) if changed else [Group(clusters, (run, ROWS), balanced=True)]
    identity = run.identity(PARTITION)

    def expected(group: Group, centroids: str | None) -> dict[int, ExpectedShard]:
        identities = {each: run.identity(shard(each)) if changed else identity for each in group.clusters}
        return {
            place: ExpectedShard(run, each, centroids, identities[each], group.rows, _listed(finished, shard(each)))
            for place, each in enumerate(group.clusters)
        }

    if finished:
        check_finished(run, finished)
        every = [each for group in groups for each in expected(group, None).values()]
        if has_centroids(run, finished) and all(each.finished() for each in every):
            return finished
    assigned, manifests = None, dict[int, Manifest]()
    with execute.session():
        clustering, centroids = _centroids(run, groups, phase(on_progress, 0.0, 0.3, "centroids"), execute)
        if finished and centroids and manifest_key(CENTROIDS) in finished.files:
            _require_listed(run, finished, centroids)
        for name in run.store.folders(f"{PARTITION}/{SHARDS}"):
            if f"{PARTITION}/{SHARDS}/{name}" not in shards_of(run.config):
                run.store.delete_one(f"{PARTITION}/{SHARDS}/{name}/{NAME}")
        for number, group in enumerate(groups):
            within = (0.3 + 0.55 * number / len(groups), 0.3 + 0.55 * (number + 1) / len(groups))
            shards = expected(group, centroids.digest if centroids else None)
            kept = {place: manifest for place, each in shards.items() if (manifest := each.finished())}
            missing = {place: each for place, each in shards.items() if place not in kept}
            own = clustering and restricted(clustering, [clusters.index(each) for each in group.clusters])
            made, assigned = group.make(run, own, missing, phase(on_progress, *within), execute)
            manifests |= {group.clusters[place]: manifest for place, manifest in (kept | made).items()}
            if finished:
                for manifest in made.values():
                    _require_listed(run, finished, manifest)
        run.store.delete(FOLDER)
        if finished:
            return finished
        every_shard = [manifests.get(each) or run.require(shard(each)) for each in clusters]
        manifest = _commit(run, every_shard, centroids, identity)
        if with_report and assigned and groups[-1].clusters == clusters:
            on_progress(0.85, "report")
            report_of(groups[-1].reader, manifest, assigned, phase(on_progress, 0.85, 1.0, "report"), execute)
    _show_sizes(manifest, on_progress)
    return manifest


def _listed(partition: Manifest | None, part: Artifact) -> FileRecord | None:
    """A finished partition's record of a part's manifest."""
    return partition.files[manifest_key(part)] if partition else None


def _centroids(
    run: Run, groups: Sequence[Group], on_progress: OnProgress, execute: Executor
) -> tuple[Clustering | None, Manifest | None]:
    """The artifact of the centroids, kept from an interrupted partition or new; None for methods without centroids."""
    if not run.config.partition.by_kmeans:
        return None, None
    identity = run.identity(CENTROIDS)
    invalidate(run, CENTROIDS, lambda: _kept_centroids(run, identity))
    if kept := _kept_centroids(run, identity):
        return kept
    if run.config.changes.of_clusters:
        clustering, num_sampled = changed_clustering(run, groups, on_progress, execute)
    else:
        clustering, num_sampled = fit_clustering(groups[0].reader, on_progress, execute)
    data = clustering.to_bytes()
    info = CentroidsInfo(rows_sampled=num_sampled, num_fine=len(clustering.centroids.fine_FD))
    # Named by its content, since a concurrent writer on another machine may have computed other bits.
    name = f"centroids-{sha256(data)[:8]}.safetensors"
    run.store.write(f"{CENTROIDS}/{name}", data)
    records = {name: FileRecord.of(data)}
    manifest = run.commit_records(CENTROIDS, records, info, identity=identity)
    for other in run.store.sizes(CENTROIDS).keys() - manifest.files.keys() - {NAME}:
        run.store.delete_one(f"{CENTROIDS}/{other}")
    return Clustering.read(run, manifest), manifest


def _kept_centroids(run: Run, identity: Identity) -> tuple[Clustering, Manifest] | None:
    try:
        manifest = run.manifest(CENTROIDS)
        if manifest and not run.drift(CENTROIDS, manifest.identity, identity):
            return Clustering.read(run, manifest), manifest
    except CorruptArtifact:
        return None
    return None


def _require_listed(run: Run, partition: Manifest, remade: Manifest) -> None:
    """Raises CorruptArtifact unless a part that was made again is the one that a finished partition lists."""
    part = Artifact(remade.artifact)
    listed = partition.files[manifest_key(part)].sha256
    if sha256(remade.to_json()) != listed:
        invalidate(run, part, lambda: ((now := run.manifest(part)) and sha256(now.to_json()) == listed) or None)
        raise CorruptArtifact(
            f"{run.url}/{part}: made again it isn't what the partition lists, on which models may have been trained;"
            " to begin with these again",
            run.remake(PARTITION),
        )


def _commit(run: Run, shards: Sequence[Manifest], centroids: Manifest | None, identity: Identity) -> Manifest:
    """Commit the partition. Its files are its parts' manifests, so its digest covers the place of every row."""
    info = partition_info([ShardInfo.of(manifest) for manifest in shards])
    parts = [*shards, centroids] if centroids else shards
    records = {manifest_key(Artifact(part.artifact)): FileRecord.of(part.to_json()) for part in parts}
    return run.commit_records(PARTITION, records, info, identity=identity)


def _own(run: Run, cluster: int, on_progress: OnProgress, execute: Executor) -> Manifest:
    """One owner's shard, from its own rows alone."""
    run.finished(shard(cluster))  # raises DriftError if the shard doesn't match the run
    group = Group((cluster,), (run, owner_rows(cluster)))
    expected = ExpectedShard(run, cluster, None, run.identity(shard(cluster)), group.rows)
    if finished := expected.finished():
        return finished
    with execute.session():
        [manifest] = group.make(run, None, {0: expected}, on_progress, execute)[0].values()
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
                    Make(run.url, artifact),
                )
        counted = len(info.counts_C)
        if counted != num_classes:
            raise DataError(
                f"{run.url}/{artifact}: counts {counted} classes, this run has {num_classes}; its owner makes it"
                " again, in a run of this configuration",
                Make(run.url, artifact),
            )
    manifest = _commit(run, list(manifests.values()), None, run.identity(PARTITION))
    _show_sizes(manifest, on_progress)
    return manifest


def _show_sizes(partition: Manifest, on_progress: OnProgress) -> None:
    rows_K = PartitionInfo.of(partition).rows_K
    on_progress(1.0, f"{len(rows_K)} clusters of {min(rows_K):,} to {max(rows_K):,} training rows")
