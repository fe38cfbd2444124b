"""Rows around a few points, and their clusters' centroids, for reports to be built of."""

import io

import numpy as np
import pyarrow as pa
from PIL import Image

from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.core.kmeans import Centroids
from ddm_ray.data.schema import EMBEDDING, HELDOUT, TRAIN, column, embeddings, rows_schema

DIM = 6
TEXTS = {
    "class_names": (),
    "num_classes": None,
    "channels": 4,
    "text": {"encoder": "any", "tokens": 2, "dim": 3},
    "latents": {"autoencoder": "any", "scale": 1.0},
}


def made_config(num_clusters: int = 4, batch: int = 8, data: dict | None = None, **partition: object) -> RunConfig:
    fields = load_recipe("tiny").model_dump(mode="json")
    fields["partition"] |= {"num_clusters": num_clusters, **partition}
    fields["expert"]["train"]["global_batch"] = batch * num_clusters
    fields["data"] |= data or {}
    return RunConfig.model_validate(fields)


def groups(config: RunConfig, sizes: list[int], spread: float = 0.3, seed: int = 0) -> tuple[pa.Table, np.ndarray]:
    """Rows around as many points as there are sizes, a fifth of them held out; and each row's group.

    The shade of an image tells its row's number. A label is that of the group for two rows of three.
    """
    rng = np.random.default_rng(seed)
    group_N = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    num_rows = len(group_N)
    points_KD = np.random.default_rng(99).normal(size=(len(sizes), DIM))
    data = config.data
    shade_N = np.arange(num_rows) % 251
    columns = {
        "id": [f"row/{number:06d}" for number in range(num_rows)],
        "content_hash": [""] * num_rows,
        "split": [HELDOUT if number % 5 == 2 else TRAIN for number in range(num_rows)],
        "embedding": column(points_KD[group_N] + rng.normal(size=(num_rows, DIM)) * spread, EMBEDDING),
    }
    if data.text is None:
        columns["data"] = column(np.broadcast_to(shade_N[:, None, None, None], (num_rows, *data.shape)), np.dtype("u1"))
        columns["label"] = np.where(np.arange(num_rows) % 3 == 0, np.arange(num_rows) % 10, group_N % 10)
    else:
        columns["data"] = column(np.zeros((num_rows, *data.shape)), np.dtype("<f2"))
        columns["text_tokens"] = [b""] * num_rows
        columns["text"] = [f"<number> {number}" for number in range(num_rows)]
        columns["thumbnail"] = [_jpeg(int(shade)) for shade in shade_N]
    return pa.table(columns, schema=rows_schema(data, DIM)), group_N


def _jpeg(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (shade, shade, shade)).save(buffer, "JPEG")
    return buffer.getvalue()


def centroids_of(table: pa.Table, cluster_N: np.ndarray) -> Centroids:
    rows_ND = embeddings(table)
    coarse_KD = np.stack([rows_ND[cluster_N == cluster].mean(axis=0) for cluster in range(cluster_N.max() + 1)])
    first = [np.flatnonzero(cluster_N == cluster)[:3] for cluster in range(len(coarse_KD))]
    fine = np.concatenate(first)
    return Centroids(rows_ND[fine], coarse_KD, cluster_N[fine])


def distances_of(table: pa.Table, cluster_N: np.ndarray, centroids: Centroids) -> np.ndarray:
    return np.linalg.norm(embeddings(table) - centroids.coarse_KD[cluster_N], axis=1)


def training(table: pa.Table) -> np.ndarray:
    return np.array(table["split"].to_pylist()) == TRAIN
