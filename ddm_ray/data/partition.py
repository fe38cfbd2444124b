"""The stage `partition`: rows -> centroids -> K clusters, one shard of rows for each, and a report of them.

N rows of a part, D dimensions of what is clustered, K clusters.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ddm_ray.core.kmeans import Centroids
from ddm_ray.data import REPORT, Progress
from ddm_ray.data.assignment import Clusters, find
from ddm_ray.data.clustering import (
    Features,
    Rows,
    fit,
    from_safetensors,
    to_safetensors,
)
from ddm_ray.data.partition_report import Report, Survey, given_report
from ddm_ray.data.partition_state import (
    SHARDS,
    below,
    check_finished,
    finished_shard,
    restore_report,
    unmake_shard,
    write_report,
)
from ddm_ray.data.schema import trains
from ddm_ray.data.scratch import scratch_folder
from ddm_ray.data.shards import ShardWriter
from ddm_ray.errors import ConfigError, CorruptArtifact, DataError, DriftError
from ddm_ray.storage.manifest import NAME, FileRecord, Identity, Manifest, drift, sha256
from ddm_ray.storage.run import CENTROIDS, PARTITION, ROWS, Run, owner_rows, shard


def partition(
    run: Run, progress: Progress | None = None, cluster: int | None = None, scratch: str | None = None
) -> Manifest:
    """Make the shards and then the artifact `partition`; a no-op if all are finished. Needs no Ray.

    `cluster`: where shards are given, make this owner's shard alone, of its own rows. `scratch`: a local folder that
    takes about what the shards do (none: the system's temporary one). Memory: the k-means sample, two parts of the
    rows and a shard's file. The same rows give the same bytes, also where this runs twice at once. Raises DataError
    if a cluster would have no training row, ConfigError, MissingArtifact, CorruptArtifact, DriftError, StorageError.
    """
    tell = progress or (lambda fraction, note: None)
    given, num_clusters = run.config.partition.method == "given", run.config.partition.num_clusters
    if cluster is None:
        return _collect(run, tell) if given else _partition(run, tell, scratch)
    if not given:
        raise ConfigError(f"--cluster is for shards that are given: partition.method is {run.config.partition.method}")
    if not 0 <= cluster < num_clusters:
        raise ConfigError(f"--cluster {cluster}: partition.num_clusters is {num_clusters}, so 0 to {num_clusters - 1}")
    return _own(run, cluster, tell, scratch)


def _partition(run: Run, tell: Progress, scratch: str | None) -> Manifest:
    clusters = range(run.config.partition.num_clusters)
    whole = run.finished(PARTITION)
    identity = run.identity(PARTITION)
    listed = {cluster: whole.files[below(shard(cluster))] if whole else None for cluster in clusters}
    if whole:
        check_finished(run, whole)
        if all(finished_shard(run, cluster, None, identity, listed[cluster]) for cluster in clusters):
            return whole
    rows = Rows(run, ROWS)
    with scratch_folder(scratch) as folder:
        fitted, centroids_manifest = _centroids(rows, identity, _phase(tell, 0.0, 0.4, "centroids"))
        digest = centroids_manifest.digest if centroids_manifest else None
        there = {cluster: finished_shard(run, cluster, digest, identity, listed[cluster]) for cluster in clusters}
        kept = {cluster: manifest for cluster, manifest in there.items() if manifest}
        missing = [cluster for cluster in clusters if cluster not in kept]
        for cluster in missing:
            unmake_shard(run, cluster, digest, identity, listed[cluster])
        for name in run.store.folders(f"{PARTITION}/{SHARDS}"):
            if f"{PARTITION}/{SHARDS}/{name}" not in map(shard, clusters):
                run.store.delete_one(f"{PARTITION}/{SHARDS}/{name}/{NAME}")
        found, centroids = find(rows, fitted, folder, _phase(tell, 0.4, 0.6, "clusters"))
        survey = None if whole else Survey(run.config, len(clusters))
        features = fitted[0] if fitted else None
        writing = _phase(tell, 0.6, 0.8, "sorting")
        with ShardWriter(run, found.rows_train_K, found.rows_heldout_K, missing, folder / "shards") as writer:
            for number, table in enumerate(rows.parts(None, writing)):
                cluster_N = found.part(number)
                writer.add(table, cluster_N)
                if survey:
                    survey.add(table, cluster_N, _distances(features, centroids, table, cluster_N))
            for done, cluster in enumerate(missing):
                tell(0.8 + 0.18 * done / len(missing), f"shard {cluster}")
                kept[cluster] = writer.commit(cluster, digest, listed[cluster])
        if whole:
            return _restored(run, whole, {cluster: kept[cluster] for cluster in missing})
        assert survey is not None
        report = survey.report(centroids, _facts(rows.manifest, centroids_manifest))
    manifests = {shard(cluster): kept[cluster] for cluster in clusters}
    if centroids_manifest:
        manifests[CENTROIDS] = centroids_manifest
    num_fine = len(centroids.fine_FD) if centroids else None
    return _commit(run, manifests, report, {"num_fine": num_fine}, identity, tell)


def _centroids(
    rows: Rows, identity: Identity, tell: Progress
) -> tuple[tuple[Features, Centroids] | None, Manifest | None]:
    """The artifact of the centroids, as an interrupted partition left it or new, for the methods that have one."""
    run = rows.run
    if not run.config.partition.by_kmeans:
        return None, None
    key = f"{CENTROIDS}/{NAME}"
    there = run.store.exists(key)  # looked for first: what a rival commits after this look stays
    if found := _kept_centroids(run, identity):
        return found
    if there:
        run.store.delete_one(key)
    features, centroids, num_sampled = fit(rows, tell)
    data = to_safetensors(features, centroids)
    # By its content, since a rival's may be other bits, from another machine.
    name = f"centroids-{sha256(data)[:8]}.safetensors"
    run.store.write(f"{CENTROIDS}/{name}", data)
    records = {name: FileRecord.of(data)}
    info = {"rows_sampled": num_sampled, "num_fine": len(centroids.fine_FD)}
    manifest = run.commit_records(CENTROIDS, records, info, identity=identity)
    for other in run.store.sizes(CENTROIDS).keys() - manifest.files.keys() - {NAME}:
        run.store.delete_one(f"{CENTROIDS}/{other}")
    return _read_centroids(run, manifest), manifest


def _kept_centroids(run: Run, identity: Identity) -> tuple[tuple[Features, Centroids], Manifest] | None:
    try:
        manifest = run.manifest(CENTROIDS)
        if manifest and not drift(identity, manifest.identity):
            return _read_centroids(run, manifest), manifest
    except CorruptArtifact:
        return None
    return None


def _read_centroids(run: Run, manifest: Manifest) -> tuple[Features, Centroids]:
    [name] = manifest.files
    return from_safetensors(run, run.read(CENTROIDS, name, manifest))


def _distances(
    features: Features | None, centroids: Centroids | None, table: Any, cluster_N: np.ndarray
) -> np.ndarray | None:
    if features is None or centroids is None:
        return None
    distance_N: np.ndarray = np.linalg.norm(features(table) - centroids.coarse_KD[cluster_N], axis=1)
    return distance_N


def _restored(run: Run, whole: Manifest, made: Mapping[int, Manifest]) -> Manifest:
    """The finished partition, if the shards made again are those it lists. Raises CorruptArtifact."""
    for cluster, manifest in made.items():
        listed = whole.files[below(shard(cluster))]
        if sha256(manifest.to_json()) != listed.sha256:
            unmake_shard(run, cluster, None, whole.identity, listed)
            raise CorruptArtifact(
                f"{run.url}/{shard(cluster)}: made again it isn't what the partition lists; {run.anew(PARTITION)}"
            )
    return whole


def _commit(
    run: Run, parts: Mapping[str, Manifest], report: Report, info: dict[str, Any], identity: Identity, tell: Progress
) -> Manifest:
    """The manifests of its parts are the partition's files, so that its digest stands for every row's place."""
    contents = {below(artifact): manifest.to_json() for artifact, manifest in parts.items()}
    pictures = {f"{REPORT}/{name}": data for name, data in report.files.items()}
    # A rival's report isn't replaced once its partition is finished.
    replaced = {} if run.finished(PARTITION) else write_report(run, pictures)
    records = {name: FileRecord.of(data) for name, data in (contents | pictures).items()}
    info = report.info | info | {"warnings": report.warnings}
    manifest = run.commit_records(PARTITION, records, info, identity=identity)
    restore_report(run, replaced, manifest)
    rows_K = manifest.info["rows_K"]
    tell(1.0, f"{len(rows_K)} clusters of {min(rows_K):,} to {max(rows_K):,} training rows")
    return manifest


def _facts(rows: Manifest, centroids: Manifest | None) -> dict[str, str]:
    facts = {name: f"{rows.info[name]:,}" for name in ("rejected", "duplicates", "dropped") if rows.info.get(name)}
    if ignored := sum(rows.info["ignored"].values()):
        facts["files of another kind"] = f"{ignored:,}"
    return facts | ({"rows sampled": f"{centroids.info['rows_sampled']:,}"} if centroids else {})


def _own(run: Run, cluster: int, tell: Progress, scratch: str | None) -> Manifest:
    """One owner's shard, of its own rows alone."""
    run.finished(shard(cluster))  # raises DriftError
    if there := finished_shard(run, cluster, None, run.identity(shard(cluster))):
        return there
    rows = Rows(run, owner_rows(cluster))
    with scratch_folder(scratch) as folder:
        clusters = Clusters(folder, run.config.partition.num_clusters)
        for number, table in enumerate(rows.parts([], _phase(tell, 0.0, 0.3, "counting"))):
            clusters.put(number, np.full(table.num_rows, cluster), trains(table))
        if not clusters.rows_train_K[cluster]:
            raise DataError(
                f"{run.url}/{owner_rows(cluster)}: has no training row; prepare more, or use a lower data.heldout"
            )
        counts = (clusters.rows_train_K, clusters.rows_heldout_K)
        with ShardWriter(run, *counts, [cluster], folder / "shards") as writer:
            for number, table in enumerate(rows.parts(None, _phase(tell, 0.3, 0.8, "sorting"))):
                writer.add(table, clusters.part(number))
            tell(0.8, f"shard {cluster}")
            manifest = writer.commit(cluster, None)
    tell(1.0, f"{manifest.info['rows_train']:,} training rows")
    return manifest


def _collect(run: Run, tell: Progress) -> Manifest:
    """The partition of given shards, from their manifests alone. Raises DriftError if one was replaced since."""
    whole = run.finished(PARTITION)
    shards = [shard(cluster) for cluster in range(run.config.partition.num_clusters)]
    if whole:
        check_finished(run, whole)
        for artifact in shards:
            manifest = run.manifest(artifact)
            if manifest and sha256(manifest.to_json()) != whole.files[below(artifact)].sha256:
                raise DriftError(
                    f"{run.url}/{PARTITION} was made of another {below(artifact)}; delete"
                    f" {run.url}/{PARTITION}/{NAME}, then: {run.command(PARTITION)}"
                )
        return whole
    manifests = {artifact: run.require(artifact) for artifact in shards}
    num_classes = len(run.config.data.class_names)
    for artifact, manifest in manifests.items():
        if len(manifest.info["counts_C"]) != num_classes:
            raise DataError(
                f"{run.url}/{artifact}: counts {len(manifest.info['counts_C'])} classes, this run has {num_classes};"
                f" its owner makes it anew, in a run of this configuration: {run.command(artifact)}"
            )
    report = given_report(run.config, [manifest.info for manifest in manifests.values()])
    return _commit(run, manifests, report, {"num_fine": None}, run.identity(PARTITION), tell)


def _phase(tell: Progress, begin: float, end: float, name: str) -> Progress:
    return lambda share, note: tell(begin + (end - begin) * share, f"{name}: {note}")
