"""A finished run in the real layout whose models were never trained: for whatever only reads a run."""

from collections.abc import Callable
from functools import partial
from string import ascii_lowercase
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import safetensors.numpy
import torch
from sklearn.datasets import load_digits
from torch import nn

from ddm_ray.config import DataConfig, load_recipe
from ddm_ray.core.condition import Text
from ddm_ray.data.order import holdout_fractions, shuffle_keys
from ddm_ray.data.schema import (
    EMBEDDING,
    HELDOUT,
    MIRRORED,
    TEXT,
    TRAIN,
    as_modelled,
    column,
    data_dtype,
    images,
    rows_schema,
    shard_file_schema,
    to_parquet,
)
from ddm_ray.data.texts import null_text_bytes
from ddm_ray.jobs.attempts import claim
from ddm_ray.models import weights
from ddm_ray.models.flops import training_flops_per_row
from ddm_ray.models.spec import router_spec, spec_of
from ddm_ray.run.graph import CENTROIDS, MONOLITH, PARTITION, REPORT, ROUTER, ROWS, Artifact, shard
from ddm_ray.run.manifest import NAME, Manifest, sha256
from ddm_ray.run.run import Run
from tests.infos import commit_written, info_of
from tests.published import publish_weights


def make_data(
    path: str,
    recipe: str = "tiny",
    settings: tuple[str, ...] = (),
    num_rows: int = 400,
    num_files: int = 1,
    row_group_rows: int | None = None,
) -> Run:
    """Rows, shards and partition of a new run at `path`, nothing trained; the same at every call.

    Rows are real digits, again and again if need be; one in ten is held out. Clusters are equal ranges of left-right
    imbalance.
    """
    run = Run.create(str(path), load_recipe(recipe, settings))
    table, cluster_N = _rows(run, num_rows)
    heldout = sum(split == HELDOUT for split in table["split"].to_pylist())
    info = {
        "rows": num_rows,
        "rows_train": num_rows - heldout,
        "rows_heldout": heldout,
        "rejected": 0,
        "duplicates": 0,
        "dropped": 0,
        "embedding_dim": run.config.embedder.dim,
        "source": run.config.data.source,
        "classes": None,
    }
    part = to_parquet(table)
    _commit(run, ROWS, {f"part-000000-0000-{sha256(part)[:8]}.parquet": part}, info)
    write_partition(run, table, cluster_N, None, num_files, row_group_rows)
    return run


TEXTS = (
    "data.image_size=4",
    "data.text={encoder: none, tokens: 5, dim: 6, pooled_dim: 3}",
    "partition.num_clusters=2",
    "expert.model={patch_size: 2, width: 16, depth: 1, heads: 2}",
    "expert.train={steps: 3, batch: 4, learning_rate: 1.0e-3, ema_decay: 0.5, condition_dropout: 0.3}",
    "router.model={patch_size: 2, width: 16, depth: 1, heads: 2}",
    "router.train={steps: 3, batch: 8, learning_rate: 1.0e-3, ema_decay: 0.5, condition_dropout: 0.3}",
)


def make_texts(path: str, settings: tuple[str, ...] = (), num_rows: int = 100, row_group_rows: int = 16) -> Run:
    """Shards and partition of a new run on latents and texts, random numbers all, in two files a split; no rows.

    Row n of num_rows has n % 5 + 1 tokens that count; cluster n % 2 has latents around 3 or -3.
    """
    run = Run.create(str(path), load_recipe("laion256-k8", (*TEXTS, *settings)))
    data, text, random = run.config.data, run.config.data.text, np.random.default_rng(0)
    assert text is not None
    cluster_N = np.arange(num_rows) % run.config.partition.num_clusters
    latents_NCHW = random.standard_normal((num_rows, *data.shape)) + np.where(cluster_N, 3, -3)[:, None, None, None]
    pooled_NP = random.standard_normal((num_rows, text.pooled_dim or 0))
    tokens = [random.standard_normal((n % text.tokens + 1, text.dim)).astype(TEXT) for n in range(num_rows)]
    columns = {
        "id": [f"texts/{number:04d}" for number in range(num_rows)],
        **_data_columns(data, latents_NCHW),
        "text_tokens": [tokens_LE.tobytes() for tokens_LE in tokens],
        "text_pooled": column(pooled_NP, TEXT),
        "text": [" ".join(ascii_lowercase[: number % text.tokens + 1]) for number in range(num_rows)],
        "split": [HELDOUT if number < num_rows // 10 else TRAIN for number in range(num_rows)],
    }
    table = pa.table(columns, schema=shard_file_schema(data).append(pa.field("split", pa.string())))
    pooled_1P = None if text.pooled_dim is None else torch.full((1, text.pooled_dim), 0.25)
    null = Text(torch.full((1, 1, text.dim), 0.5), torch.ones(1, 1, dtype=torch.bool), pooled_1P)
    write_partition(run, table, cluster_N, null_text_bytes(null), num_files=2, row_group_rows=row_group_rows)
    return run


def make_run(
    path: str,
    recipe: str = "tiny",
    settings: tuple[str, ...] = (),
    num_rows: int = 400,
    spread: float = 0.05,
    num_files: int = 1,
) -> Run:
    """`make_data`, and experts, router and monolith as if trained: the same at every call.

    Models have seeded random weights: all of a fresh model's parameters plus `spread` times N(0, 1).
    """
    run = make_data(path, recipe, settings, num_rows, num_files)
    publish_models(run, spread)
    return run


def publish_models(run: Run, spread: float = 0.05) -> None:
    """Experts, router and monolith of a partitioned run as if trained; see `make_run`."""
    config = run.config
    for number, artifact in enumerate([*run.experts, MONOLITH]):
        spec = spec_of(config, artifact.kind, artifact.cluster)
        train = (config.monolith if artifact.cluster is None else config.expert_of(artifact.cluster)).train
        publish(run, artifact, _perturbed(partial(weights.build, spec), number, spread), train.steps, train.batch)
    router = _perturbed(partial(weights.build, router_spec(config)), 1000, spread)
    publish(run, ROUTER, router, config.router.train.steps, config.router.train.batch)


def publish(run: Run, artifact: Artifact, model: nn.Module, steps: int, batch: int) -> None:
    """Commit a model as a finished training job's artifact, the way training does, unless the run keeps its base's."""
    if run.inherits(artifact):
        return
    attempt = claim(run.store, artifact)
    asked = spec_of(run.config, artifact.kind, artifact.cluster)
    tensors, spec = weights.weights_as_bytes(model, {**asked, **weights.spec_of_model(model)})
    files = {"ema.safetensors": tensors, "model.json": spec.encode()}
    prefix, _ = publish_weights(attempt, steps, run.identity(artifact), files)
    text = run.config.data.text
    flops = training_flops_per_row(model, run.config.data.shape, 0 if text is None else text.tokens)
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
    commit_written(run, artifact, [f"{prefix}/{name}" for name in files], info_of(artifact, **info))


def _rows(run: Run, num_rows: int) -> tuple[pa.Table, np.ndarray]:
    digits = load_digits()
    digit_N = np.arange(num_rows) % len(digits.images)
    pixels_NHW = np.rint(digits.images * (255 / 16)).astype(np.uint8)[digit_N]
    imbalance_N = pixels_NHW[:, :, :4].mean((1, 2)) - pixels_NHW[:, :, 4:].mean((1, 2))
    rank_N = np.argsort(np.argsort(imbalance_N, kind="stable"), kind="stable")
    ids = [f"digits/{number:04d}" for number in range(num_rows)]
    heldout_N = np.argsort(np.argsort(holdout_fractions(ids))) < num_rows // 10
    embeddings_ND = as_modelled(pixels_NHW).reshape(num_rows, -1)[:, : run.config.embedder.dim]
    columns = {
        "id": ids,
        "content_hash": [sha256(pixels_HW.tobytes()) for pixels_HW in pixels_NHW],
        **_data_columns(run.config.data, _data(run.config.data, pixels_NHW)),
        "label": digits.target[digit_N],
        "embedding": column(embeddings_ND, EMBEDDING),
        "split": np.where(heldout_N, HELDOUT, TRAIN).tolist(),
    }
    if run.config.data.latents is not None:
        columns["thumbnail"] = [b""] * num_rows
    table = pa.table(columns, schema=rows_schema(run.config.data, run.config.embedder.dim))
    return table, rank_N * run.config.partition.num_clusters // num_rows


def _data_columns(config: DataConfig, data_NCHW: np.ndarray) -> dict[str, Any]:
    """The columns of rows' data; the latents of mirror images are those of images less 1, which mirroring isn't."""
    mirrored = {MIRRORED: column(data_NCHW - 1, data_dtype(config))} if config.stores_mirrored else {}
    return {"data": column(data_NCHW, data_dtype(config)), **mirrored}


def _data(config: DataConfig, pixels_NHW: np.ndarray) -> np.ndarray:
    """The pixels, with a margin of noise that differs along it; as latents, a downsampled picture in every channel."""
    if config.latents is None:
        before = config.crop_margin // 2
        framed_NHW = np.random.default_rng(0).integers(
            256, size=(len(pixels_NHW), *config.stored_shape[1:]), dtype=np.uint8
        )
        framed_NHW[:, before : before + pixels_NHW.shape[1], before : before + pixels_NHW.shape[2]] = pixels_NHW
        return framed_NHW
    step = pixels_NHW.shape[1] // config.shape[1]
    small_N1HW = as_modelled(pixels_NHW)[:, None, ::step, ::step]
    return np.broadcast_to(small_N1HW, (len(small_N1HW), *config.shape))


def write_partition(
    run: Run,
    table: pa.Table,
    cluster_N: np.ndarray,
    null_text: bytes | None = None,
    num_files: int = 1,
    row_group_rows: int | None = None,
) -> None:
    """Shards, and the partition that lists them, of rows by `rows_schema`: each split in `num_files` files."""
    data, num_clusters = run.config.data, run.config.partition.num_clusters
    files = {"centroids.safetensors": safetensors.numpy.save({"coarse_KD": np.zeros((num_clusters, 1), np.float32)})}
    centroids = _commit(run, CENTROIDS, files, {}).digest if run.config.partition.by_kmeans else None
    infos, clusters = [], run.config.partition.clusters
    for position, cluster in enumerate(clusters):
        mine = table.filter(pa.array(cluster_N == position))
        mine = mine.take(pa.array(np.argsort(shuffle_keys(mine["id"].to_pylist()))))
        parts = {split: mine.filter(pc.equal(mine["split"], split)) for split in (TRAIN, HELDOUT)}
        files = {} if null_text is None else {"null_text.safetensors": null_text}
        for split, rows in parts.items():
            rows = rows.select(shard_file_schema(data).names)
            for number, index in enumerate(np.array_split(np.arange(len(rows)), num_files)):
                if len(index):
                    files[f"{split}-{number:05d}.parquet"] = to_parquet(rows.take(pa.array(index)), row_group_rows)
        train = parts[TRAIN]
        labels = train["label"].to_numpy() if data.text is None else np.zeros(0, int)
        info = {
            "cluster": cluster,
            "rows": len(mine),
            "rows_train": len(train),
            "rows_heldout": len(parts[HELDOUT]),
            "counts_C": np.bincount(labels, minlength=len(data.class_names)).tolist(),
            "data_std": float(images(train, data).std(dtype=np.float64)) if len(train) else 0.0,
            "centroids": centroids,
        }
        _commit(run, shard(cluster), files, info)
        infos.append(info)
    info = {
        "counts_CK": np.array([info["counts_C"] for info in infos]).T.tolist(),
        "rows_K": [info["rows_train"] for info in infos],
        "rows_heldout_K": [info["rows_heldout"] for info in infos],
        "num_fine": num_clusters,
    }
    parts_of_it = [shard(cluster) for cluster in clusters] + ([CENTROIDS] if centroids else [])
    listed = [f"{artifact.removeprefix(f'{PARTITION}/')}/{NAME}" for artifact in parts_of_it]
    commit_written(run, PARTITION, listed, info_of(PARTITION, **info))
    _commit(run, REPORT, {"report.html": b"<!doctype html>"}, {})


def _perturbed(build: Callable[[], nn.Module], seed: int, spread: float) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(spread * torch.randn_like(parameter))
    return model


def _commit(run: Run, artifact: Artifact, files: dict[str, bytes], info: dict[str, Any]) -> Manifest:
    for name, data in files.items():
        run.store.write(f"{artifact}/{name}", data)
    return commit_written(run, artifact, list(files), info_of(artifact, **info))
