"""Samples of one denoiser at a milestone, always from the same noise and classes, to compare pictures by eye.

Shapes: B images, C channels, H x W.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ddm_ray.core.flow import Flow
from ddm_ray.core.streams import SeedPurpose, consecutive_seeds
from ddm_ray.core.transfer import frozen_dtype
from ddm_ray.models import weights
from ddm_ray.models.latents import Latents
from ddm_ray.pictures.grid import GridRow, grid
from ddm_ray.pictures.png import to_png
from ddm_ray.run.graph import PARTITION, Artifact, expert, shard
from ddm_ray.run.info import PartitionInfo, ShardInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import (
    ModelKind,
    Models,
    expert_info,
    load_base,
    matched,
    monolith_info,
    row_networks,
    settings_of,
)

MAX_CLASSES, PER_CLASS = 8, 4
ROWS_WITHOUT_CLASSES = 4


def picture(
    run: Run,
    spec: dict,
    ema: bytes,
    cluster: int | None,
    device: torch.device | str,
    kind: ModelKind = "monolith",
    given_up: Callable[[], bool] = lambda: False,
) -> bytes | None:
    """PNG of samples of one denoiser of labels with these EMA weights, as the run samples.

    Rows are the classes with the most training rows in its `cluster`; for None (a network of this `kind`) in all
    clusters. A single class gets several rows. It may run in a thread beside training: torch's generator and number of
    threads stay as they are. None once it is `given_up`, which is asked between two steps.
    Raises MissingArtifact without the shard or partition, CorruptArtifact, and ConfigError for latents without their
    autoencoder.
    """
    labels = labels_of(run, cluster)
    dtype = frozen_dtype(device)
    base = load_base(run, Artifact(kind) if cluster is None else expert(cluster), device, dtype)
    model = matched(weights.load_model(spec, ema, base), Flow(**spec.get("flow", {}))).to(device, dtype)
    config = run.config.data.latents
    known = row_networks(run).get("autoencoder")
    latents = None if config is None else Latents.from_config(config, known).to(device)
    request = SampleRequest(
        consecutive_seeds(run.config.evaluate.seed, len(labels) * PER_CLASS, SeedPurpose.PREVIEW),
        torch.tensor(labels).repeat_interleave(PER_CLASS),
        settings_of(run, kind).changed(strategy="once"),
    )
    info = monolith_info(run, kind) if cluster is None else expert_info(run, cluster)
    models = Models(info, (model,), None, str(device))
    images_BCHW = models.sample(request, interrupted=given_up).images_BCHW
    if given_up():
        return None
    class_names = run.named.data.class_names
    names = ["" if len(set(labels)) == 1 else class_names[label] for label in labels]
    rows = [
        GridRow(name, _decoded(latents, part_BCHW, device))
        for name, part_BCHW in zip(names, images_BCHW.split(PER_CLASS), strict=True)
    ]
    return to_png(grid(rows))


def labels_of(run: Run, cluster: int | None) -> list[int]:
    """The label of each row of the picture, from the manifests alone: the same for every attempt."""
    if cluster is None:
        counts = [sum(counts_K) for counts_K in PartitionInfo.of(run.require(PARTITION)).counts_CK]
    else:
        counts = list(ShardInfo.of(run.require(shard(cluster))).counts_C)
    most = sorted(range(len(counts)), key=lambda label: -counts[label])[:MAX_CLASSES]
    labels = sorted(label for label in most if counts[label] > 0)
    return labels if len(labels) > 1 else (labels or [0]) * ROWS_WITHOUT_CLASSES


def _decoded(latents: Latents | None, part_BCHW: Tensor, device: torch.device | str) -> Tensor:
    # One row at a time: an autoencoder takes far more memory than the latents do.
    return part_BCHW if latents is None else latents.decode(part_BCHW.to(device)).cpu()
