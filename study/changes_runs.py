"""The runs of `changes.py`: pictures of nine families in folders, mixtures of them, and runs derived from these."""

import os
from collections.abc import Iterable
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ddm_ray.config.derive import ChangeRequest
from ddm_ray.data.partition.clustering import Clustering
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.sources.shapes import FAMILIES, draw
from ddm_ray.jobs.derive import begin_derived, plan_derivation
from ddm_ray.jobs.published import published
from ddm_ray.models.router import Router
from ddm_ray.run.graph import CENTROIDS, ROUTER, Artifact, rows_of
from ddm_ray.run.run import Run
from ddm_ray.sampling.initial_weights import create_run, require_initial_weights
from ddm_ray.sampling.kept_router import keep_router
from ddm_ray.sampling.run_models import Models, load_models
from ddm_ray.train.job import train_job
from studies import Data

NAMES = FAMILIES[:9]
LAST = ("columns", "ring", "triangle")
"""The family that comes last, by seed."""
PARTS = 20
"""Weights of a router that are kept on the way to its last step."""


def data_of(source: Path, clusters: int, seed: int, steps: int) -> Data:
    """The settings of `shapes` with told families, on the pictures of a folder."""
    names = ", ".join(NAMES)
    return Data(
        "changes",
        "digits",
        (
            f"data={{source: '{source}', image_size: 16, channels: 3, class_names: [{names}], heldout: 0.1}}",
            "embedder={kind: lite0, image_size: 64}",
            f"partition={{num_clusters: {clusters}, num_fine: 128, metric: spherical, seed: {seed}}}",
            "expert.model={patch_size: 4, width: 64, depth: 2, heads: 4, analytic_skip: 0.5}",
            "router.model={patch_size: 4, width: 32, depth: 1, heads: 2}",
            "expert.train.learning_rate=4.0e-3",
            "expert.train.batch=16",
            *(f"{part}.train.{field}" for part in ("expert", "router") for field in (f"steps={steps}", f"seed={seed}")),
            *(f"{part}.train.ema_decay=0.99" for part in ("expert", "router")),
            *(f"{part}.train.warmup_steps={steps // PARTS}" for part in ("expert", "router")),
        ),
    )


def write_pictures(folder: Path, each: int) -> None:
    """PNG files of each family in a folder of its own, below `families`; and for each seed, links to them."""
    if (folder / "written").exists():
        return
    for family, name in enumerate(NAMES):
        (folder / "families" / name).mkdir(parents=True, exist_ok=True)
        for number, pixels_HWC in enumerate(islice(pictures(0, family), each)):
            Image.fromarray(pixels_HWC).save(folder / "families" / name / f"{number:05d}.png")
    for last in LAST:
        sources = {"base": [name for name in NAMES if name != last], "last": [last], "all": NAMES}
        for source, names in sources.items():
            for name in names:
                (folder / last / source / name).mkdir(parents=True, exist_ok=True)
                for file in (folder / "families" / name).iterdir():
                    link = folder / last / source / name / file.name
                    if not link.exists():
                        os.link(file, link)
    (folder / "written").touch()


def pictures(seed: int, family: int) -> Iterable[Any]:
    """Pictures of a family, pixels_HWC uint8, without end."""
    return (pixels_HWC for pixels_HWC, own in (draw(seed, index) for index in count()) if own == family)


def derived(base: Run, folder: Path, *settings: str, **request: Any) -> Run:
    """A run that is derived from another one, as by the command, with its rows and partition."""
    planned = plan_derivation(base, ChangeRequest(settings=settings, **request))
    run, _ = begin_derived(str(folder), planned, require_initial_weights, create_run)
    for artifact in rows_of(run.config):
        prepare(run, cluster=artifact.cluster, execute=serial)
    partition(run, with_report=False)
    if planned.config.changes.only_dropped:
        keep_router(run)
    return run


def with_router(run: Run, step: int) -> Models:
    """A run's mixture with the router as it was after a step."""
    [weights] = [each for each in published(run, [ROUTER])[ROUTER] if each.step == step][:1]
    return load_models(run, milestones={} if weights.final else {ROUTER: weights})


def flops_of(run: Run, steps: dict[Artifact, int]) -> int:
    """FLOPs of the first steps of trainings."""
    return sum(train_job(run, artifact).training_flops(own) for artifact, own in steps.items())


def nearest_cluster(run: Run, cluster: int) -> int:
    """The place of the other cluster whose centroid's direction is nearest."""
    coarse_KD = torch.from_numpy(Clustering.read(run, run.require(CENTROIDS)).centroids.coarse_KD)
    likeness_K = torch.cosine_similarity(coarse_KD, coarse_KD[cluster], dim=1)
    likeness_K[cluster] = -1
    return int(likeness_K.argmax())


def starts(before: Router, nearest: int) -> dict[str, Router]:
    """Routers of one more cluster that begin otherwise than `with_experts` does."""
    known: list[int | None] = [*range(before.config["num_experts"])]
    zero, copied = before.with_experts([*known, None]), before.with_experts([*known, nearest])
    with torch.no_grad():
        zero.head.weight[-1] = 0
        zero.head.bias[-1] = 0
    return {"zero": zero, "copied": copied}
