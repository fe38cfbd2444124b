"""The stage `partition`: the rows' embeddings -> K clusters, one shard of rows for each.

N rows, D dimensions of an embedding, C classes, K clusters.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.numpy

from ddm_ray.core.kmeans import Centroids, assign, two_level_kmeans
from ddm_ray.data import Progress
from ddm_ray.data.schema import TRAIN, images, matrix, read_artifact, shard_schema, to_parquet
from ddm_ray.errors import DataError
from ddm_ray.storage.manifest import NAME, Manifest
from ddm_ray.storage.run import PARTITION, ROWS, Run, shard

SHARD_FILE = "part-0.parquet"
CENTROIDS_FILE = "centroids.safetensors"


def partition(run: Run, progress: Progress | None = None) -> Manifest:
    """Make the shards and then the artifact `partition`; a no-op if all are finished. Needs no Ray.

    The same rows give the same bytes. Raises DataError if a cluster would have no training row,
    MissingArtifact without rows, CorruptArtifact, DriftError.
    """
    whole = run.finished(PARTITION)
    there = {cluster for cluster in range(run.config.partition.num_clusters) if whole and run.finished(shard(cluster))}
    if whole and len(there) == run.config.partition.num_clusters:
        return whole
    tell = progress or (lambda fraction, note: None)
    tell(0.0, "reading rows")
    rows = read_artifact(run, ROWS)
    config = run.config.partition
    train_N = np.array(rows["split"].to_pylist()) == TRAIN
    embeddings_ND = _embeddings(run, rows)
    num_train = int(train_N.sum())
    if num_train < config.num_clusters:
        raise DataError(
            f"{run.url}: partition.num_clusters is {config.num_clusters}, but there are only {num_train}"
            " training rows; lower it"
        )
    tell(0.2, f"k-means of {num_train} rows")
    chosen = np.flatnonzero(train_N)
    if num_train > config.sample_rows:
        drawn = np.random.default_rng(config.seed).choice(num_train, config.sample_rows, replace=False)
        chosen = chosen[np.sort(drawn)]
    centroids = two_level_kmeans(
        embeddings_ND[chosen], config.num_fine, config.num_clusters, config.iterations, config.seed
    )
    cluster_N = assign(embeddings_ND, centroids.coarse_KD)
    info = _count(run, rows, cluster_N, train_N) | {"num_fine": len(centroids.fine_FD)}
    for cluster in range(config.num_clusters):
        tell(0.5 + 0.4 * cluster / config.num_clusters, f"shard {cluster}")
        if cluster not in there:
            _write_shard(run, rows, cluster_N, cluster)
    run.store.write(f"{PARTITION}/{CENTROIDS_FILE}", _centroids_file(centroids))
    # The shards' manifests are files of the partition, so that its digest stands for every row's place.
    shards = [shard(cluster).removeprefix(f"{PARTITION}/") for cluster in range(config.num_clusters)]
    manifest = run.commit(PARTITION, [CENTROIDS_FILE, *(f"{name}/{NAME}" for name in shards)], info)
    tell(1.0, f"{config.num_clusters} clusters of {min(info['rows_K'])} to {max(info['rows_K'])} training rows")
    return manifest


def _embeddings(run: Run, rows: pa.Table) -> np.ndarray:
    embeddings_ND = matrix(rows, "embedding")
    broken = np.flatnonzero(~np.isfinite(embeddings_ND).all(axis=1))
    if len(broken):
        row_id = rows["id"][int(broken[0])].as_py()
        raise DataError(
            f"{run.url}: {len(broken)} embeddings aren't finite, e.g. of {row_id}; check embedder.checkpoint"
        )
    return embeddings_ND


def _count(run: Run, rows: pa.Table, cluster_N: np.ndarray, train_N: np.ndarray) -> dict[str, Any]:
    """counts_CK and rows_K of the training rows. Raises DataError for an empty cluster."""
    counts_CK = np.zeros((run.config.data.num_classes or 0, run.config.partition.num_clusters), dtype=np.int64)
    np.add.at(counts_CK, (rows["label"].to_numpy()[train_N], cluster_N[train_N]), 1)
    rows_K = counts_CK.sum(axis=0)
    if empty := [cluster for cluster, count in enumerate(rows_K) if not count]:
        raise DataError(
            f"{run.url}: clusters {empty} have no training row: too few different embeddings;"
            " lower partition.num_clusters"
        )
    return {"counts_CK": counts_CK.tolist(), "rows_K": rows_K.tolist()}


def _write_shard(run: Run, rows: pa.Table, cluster_N: np.ndarray, cluster: int) -> None:
    artifact, shape = shard(cluster), run.config.data.shape
    schema = shard_schema(shape)
    mine = rows.filter(pa.array(cluster_N == cluster))
    mine = mine.append_column("cluster", pa.array(np.full(mine.num_rows, cluster, np.int32)))
    # An interrupted partition's shard is unmade before it is replaced; a rival's has the same bytes as this one.
    run.store.delete_one(f"{artifact}/{NAME}")
    run.store.write(f"{artifact}/{SHARD_FILE}", to_parquet(mine.select(schema.names).cast(schema)))
    train = images(mine, shape)[np.array(mine["split"].to_pylist()) == TRAIN]
    std = float(train.std(dtype=np.float64))
    info = {"cluster": cluster, "rows": mine.num_rows, "rows_train": len(train), "data_std": std}
    run.commit(artifact, [SHARD_FILE], info)


def _centroids_file(centroids: Centroids) -> bytes:
    return safetensors.numpy.save(
        {
            "fine_FD": centroids.fine_FD,
            "coarse_KD": centroids.coarse_KD,
            "fine_to_coarse_F": centroids.fine_to_coarse_F,
        }
    )
