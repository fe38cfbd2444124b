"""A finished run in the real layout whose models were never trained: for whatever only reads a run."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch
from sklearn.datasets import load_digits
from torch import nn

from ddm_ray.config import load_recipe
from ddm_ray.data.schema import HELDOUT, TRAIN, matrix, rows_schema, shard_schema, to_parquet, vectors
from ddm_ray.models import weights
from ddm_ray.models.dit import DiT
from ddm_ray.models.flops import training_flops_per_row
from ddm_ray.models.router import Router
from ddm_ray.storage.attempts import claim
from ddm_ray.storage.manifest import sha256
from ddm_ray.storage.run import MONOLITH, PARTITION, ROUTER, ROWS, Run, shard


def make_data(path: str, recipe: str = "tiny", settings: tuple[str, ...] = (), num_rows: int = 400) -> Run:
    """Rows, shards and partition of a new run at `path`, nothing trained; the same at every call.

    Rows are real digits, clusters are equal ranges of left-right imbalance, one row in ten is held out.
    """
    run = Run.create(str(path), load_recipe(recipe, settings))
    table, cluster_N = _rows(run, num_rows)
    _write(run, ROWS, "part-0.parquet", to_parquet(table))
    heldout = sum(split == "heldout" for split in table["split"].to_pylist())
    run.commit(ROWS, ["part-0.parquet"], {"rows": num_rows, "rows_heldout": heldout, "rejected": 0, "duplicates": 0})
    _partition(run, table, cluster_N)
    return run


def make_run(
    path: str, recipe: str = "tiny", settings: tuple[str, ...] = (), num_rows: int = 400, spread: float = 0.05
) -> Run:
    """`make_data`, and experts, router and monolith as if trained: the same at every call.

    Models have seeded random weights: all of a fresh model's parameters plus `spread` times N(0, 1).
    """
    run = make_data(path, recipe, settings, num_rows)
    data, steps, num_clusters = (
        run.config.data,
        run.config.expert.train.steps,
        run.config.partition.num_clusters,
    )
    shape = {"image_size": data.image_size, "channels": data.channels, "num_classes": data.num_classes}
    batch = run.config.expert.train.global_batch
    denoisers = [*run.experts, MONOLITH]
    for number, artifact in enumerate(denoisers):
        model = _perturbed(lambda: DiT(**shape, **run.config.expert.model.model_dump()), number, spread)
        publish(run, artifact, model, steps, batch if artifact == MONOLITH else batch // num_clusters)
    router = _perturbed(
        lambda: Router(num_experts=num_clusters, **shape, **run.config.router.model.model_dump()),
        1000,
        spread,
    )
    publish(run, ROUTER, router, run.config.router.train.steps, run.config.router.train.global_batch)
    return run


def publish(run: Run, artifact: str, model: nn.Module, steps: int, batch: int) -> None:
    """Commit a model as a finished training job's artifact, the way training does."""
    attempt = claim(run.store, artifact)
    tensors, spec = weights.to_bytes(model, weights.describe(model))
    files = {"ema.safetensors": tensors, "model.json": spec.encode()}
    prefix, _ = attempt.publish_weights(steps, run.identity(artifact), files, {"step": steps})
    flops = training_flops_per_row(model, run.config.data.shape)
    info = {
        "weights": prefix,
        "step": steps,
        "rows_seen": steps * batch,
        "training_flops": float(flops * steps * batch),
        "training_flops_per_row": float(flops),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": 1.5,
        "loss": 0.25,
        "attempts": 1,
    }
    run.commit(artifact, [f"{prefix}/{name}" for name in files], info)


def _rows(run: Run, num_rows: int) -> tuple[pa.Table, np.ndarray]:
    digits = load_digits()
    images = digits.images[:num_rows].astype(np.float32) / 8 - 1
    imbalance = images[:, :, :4].mean((1, 2)) - images[:, :, 4:].mean((1, 2))
    rank_N = np.argsort(np.argsort(imbalance, kind="stable"), kind="stable")
    cluster_N = rank_N * run.config.partition.num_clusters // num_rows
    flat = images.reshape(num_rows, -1)
    table = pa.table(
        {
            "id": [f"digits/{number:04d}" for number in range(num_rows)],
            "content_hash": [sha256(row.tobytes()) for row in flat],
            "data": vectors(flat),
            "label": pa.array(digits.target[:num_rows], pa.int64()),
            "embedding": vectors(flat[:, : run.config.embedder.dim]),
            "split": np.where(np.random.default_rng(0).permutation(num_rows) < num_rows // 10, HELDOUT, TRAIN),
        }
    )
    schema = rows_schema(run.config.data.shape, run.config.embedder.dim)
    return table.select(schema.names).cast(schema), cluster_N


def _partition(run: Run, table: pa.Table, cluster_N: np.ndarray) -> None:
    num_clusters, num_classes = run.config.partition.num_clusters, run.config.data.num_classes
    train_N = np.array(table["split"].to_pylist()) == "train"
    label_N = table["label"].to_numpy()
    counts_CK = np.zeros((num_classes, num_clusters), dtype=int)
    np.add.at(counts_CK, (label_N[train_N], cluster_N[train_N]), 1)
    for cluster in range(num_clusters):
        rows = table.filter(pa.array(cluster_N == cluster))
        rows = rows.append_column("cluster", pa.array(np.full(len(rows), cluster), pa.int32()))
        schema = shard_schema(run.config.data.shape)
        rows = rows.select(schema.names).cast(schema)
        _write(run, shard(cluster), "part-0.parquet", to_parquet(rows))
        train = rows.filter(pa.array([split == "train" for split in rows["split"].to_pylist()]))
        std = float(matrix(train, "data").std())
        info = {"cluster": cluster, "rows": len(rows), "rows_train": len(train), "data_std": std}
        run.commit(shard(cluster), ["part-0.parquet"], info)
    _write(run, PARTITION, "centroids.safetensors", b"")
    info = {
        "counts_CK": counts_CK.tolist(),
        "rows_K": np.bincount(cluster_N).tolist(),
        "num_fine": num_clusters,
    }
    run.commit(PARTITION, ["centroids.safetensors"], info)


def _perturbed(build: Callable[[], nn.Module], seed: int, spread: float) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(spread * torch.randn_like(parameter))
    return model


def _write(run: Run, artifact: str, name: str, data: bytes) -> None:
    run.store.write(f"{artifact}/{name}", data)
