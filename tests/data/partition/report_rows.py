"""Rows around a few points, their clusters' centroids, and reports that are built of them."""

import io

import numpy as np
import pyarrow as pa
from PIL import Image

from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.data.partition.numbers import partition_info
from ddm_ray.data.partition.report_builder import Report, ReportBuilder
from ddm_ray.data.schema import EMBEDDING, HELDOUT, TRAIN, column, embeddings, rows_schema
from ddm_ray.run.graph import ROWS
from ddm_ray.run.info import PartitionInfo, RowsInfo, ShardInfo
from tests.infos import info_of as rows_info

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
    fields["expert"]["train"]["batch"] = batch
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


def distances_of(table: pa.Table, cluster_N: np.ndarray) -> np.ndarray:
    """Of each row from the mean of its cluster."""
    rows_ND = embeddings(table)
    mean_KD = np.stack([rows_ND[cluster_N == cluster].mean(axis=0) for cluster in range(cluster_N.max() + 1)])
    return np.linalg.norm(rows_ND - mean_KD[cluster_N], axis=1)


def training(table: pa.Table) -> np.ndarray:
    return np.array(table["split"].to_pylist()) == TRAIN


def info_of(rows: list[tuple[int, int, list[int]]]) -> PartitionInfo:
    """What a partition's manifest says of shards of so many training and held-out rows, and counts by class."""
    fields = {"data_std": None, "centroids": None}
    shards = [
        ShardInfo(cluster=k, rows=train + held, rows_train=train, rows_heldout=held, counts_C=counts_C, **fields)
        for k, (train, held, counts_C) in enumerate(rows)
    ]
    return partition_info(shards)


def counted(config: RunConfig, table: pa.Table, cluster_N: np.ndarray) -> PartitionInfo:
    train_N, num_classes = training(table), len(config.data.class_names)
    rows = []
    for cluster in range(config.partition.num_clusters):
        mine_N = cluster_N == cluster
        label_N = table["label"].to_numpy()[train_N & mine_N] if num_classes else np.zeros(0, int)
        counts_C = np.bincount(label_N, minlength=num_classes).tolist()
        rows.append(((train_N & mine_N).sum(), (~train_N & mine_N).sum(), counts_C))
    return info_of(rows)


def begun(config: RunConfig, table: pa.Table, cluster_N: np.ndarray) -> ReportBuilder:
    """The builder of these rows' report, before it sees any."""
    info = counted(config, table, cluster_N)
    return ReportBuilder(config, info, sum(info.rows_K))


def built(config: RunConfig, table: pa.Table, cluster_N: np.ndarray) -> Report:
    """The report of the rows, seen in parts of uneven sizes."""
    distance_N, builder = distances_of(table, cluster_N), begun(config, table, cluster_N)
    for part in np.split(np.arange(table.num_rows), [1, 40, 41, 333]):
        builder.add(table.take(pa.array(part)), cluster_N[part], distance_N[part])
    reason, loss = ({"id": "a", "reason": what, "rows": 2} for what in ("no <label>", "its colour profile"))
    rows = rows_info(ROWS, credit="Ada <b>", rejected=2, reasons=(reason,), losses=(loss,))
    assert isinstance(rows, RowsInfo)
    return builder.build(rows)
