"""Measures each model of an evaluation by its samples, its held-out loss and its training.

Shapes: N rows, CHW image.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import permutations
from typing import Any

import numpy as np
import torch
from PIL import Image

import ddm_ray
from ddm_ray.config import RunConfig
from ddm_ray.data import OnProgress, phase
from ddm_ray.data.loading.loader import Rows
from ddm_ray.evaluate.apart import apart, apart_in_words, recognised_shares
from ddm_ray.evaluate.candidates import Decode, Lineup
from ddm_ray.evaluate.controls import MOSAICS, NOISE
from ddm_ray.evaluate.costs import training_cost
from ddm_ray.evaluate.curves import training_curves
from ddm_ray.evaluate.features import features_in_words
from ddm_ray.evaluate.figures import experts_figure, shown_beside
from ddm_ray.evaluate.image_set import ImageSet, PulledDistance, Reference
from ddm_ray.evaluate.losses import Loss, heldout_losses
from ddm_ray.evaluate.metrics import Difference, row_of
from ddm_ray.evaluate.mixture_picture import mixture_picture
from ddm_ray.evaluate.real_rows import RealRows
from ddm_ray.evaluate.reference import Instruments, make_reference
from ddm_ray.evaluate.router import router_diagnostics
from ddm_ray.evaluate.samples import CandidateSamples
from ddm_ray.pictures.grid import GridRow, grid
from ddm_ray.pictures.png import to_png
from ddm_ray.run.graph import PARTITION, Artifact
from ddm_ray.run.info import PartitionInfo
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.run_models import Models, mixture_info
from ddm_ray.train.job import train_job


def measure(
    run: Run,
    name: str,
    lineup: Lineup,
    rows: RealRows,
    request: SampleRequest,
    samples: Sequence[CandidateSamples],
    by: Instruments,
    on_progress: OnProgress,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The metrics of an evaluation, and its pictures: files of PNG by their names.

    `request`: the request for all images. `samples`: those of each candidate.
    """
    seen, milestones = rows.decoded(by.decode), lineup.milestones
    reference = reference_of(run, seen, by, phase(on_progress, 0.78, 0.82))
    table, distances = list[dict[str, Any]](), dict[str, PulledDistance]()
    recognised = dict[str, list[float] | None]()
    for number, (candidate, each) in enumerate(zip(lineup.candidates, samples, strict=True)):
        on_progress(0.82 + 0.1 * number / len(samples), f"measuring: {candidate.name}")
        images = reference.see(each.images, each.number_M)
        distances[candidate.name], recognised[candidate.name] = images.distance, recognised_shares(images)
        sampling = candidate.settings.model_dump(mode="json", exclude={"strategy"})
        table.append({"model": candidate.name} | row_of(images) | each.costs() | {"sampling": sampling})
        del images  # so that the features of only one candidate are in memory
    differences = [Difference.of(names, *(distances[one] for one in names)) for names in permutations(distances, 2)]
    on_progress(0.92, "real rows and held-out losses")
    config, strategies = run.config, run.config.evaluate.strategies
    best = best_strategy(config, {row["model"]: row["frechet"] for row in table})
    cost = training_cost(run, lineup.missing, milestones)
    trained = [Artifact(job.job) for job in cost.jobs]
    metrics = {
        "run": config.name,
        "credit": run.credit,
        "name": name,
        "num_samples": len(request.seeds),
        "num_real": reference.real.rows,
        "num_kept": len(reference.real.label_M),
        "num_heldout": len(rows.heldout),
        "rows_elsewhere": rows.elsewhere,
        "features": features_in_words(config.evaluate.features, reference.num_features),
        "num_clusters": config.partition.num_clusters,
        "clusters": list(config.partition.clusters),
        "seed": config.evaluate.seed,
        "sampling": config.sample.model_dump(mode="json", exclude={"strategy"}),
        "models": table,
        "apart": apart(run, best, recognised.get(best)),
        "differences": [asdict(each) for each in differences],
        "missing": lineup.missing | _without_captions(config, by),
        "clip": None if by.captions is None else config.evaluate.clip,
        "real": _real_lines(reference, len(request.seeds), seen),
        "heldout_loss": [asdict(loss) for loss in _losses(config, lineup, rows.heldout)],
        "router": router_diagnostics(lineup.mixture, rows.heldout, request, strategies, reference, by.decode),
        "training": asdict(cost),
        "curves": training_curves(run, trained, milestones),
        "milestones": {
            str(artifact): {"step": weights.step, "of": train_job(run, artifact).train.steps}
            for artifact, weights in milestones.items()
        },
        "versions": _versions(),
    }
    on_progress(0.96, "writing the report")
    sentence = apart_in_words(metrics) or ""
    pictures = {
        "mixture.png": mixture_picture(run, lineup, seen, request, by.decode, best, sentence),
        "grid.png": _grid(run.named, lineup, seen.shown, request, by.decode),
        "experts.png": experts_figure(run, lineup.mixture, seen.shown, by.decode),
    }
    return metrics, {file: to_png(picture) for file, picture in pictures.items()}


def best_strategy(config: RunConfig, frechet: Mapping[str, float]) -> str:
    """The measured strategy with the lowest Fréchet distance; `once` if none was measured."""
    measured = [strategy for strategy in config.evaluate.strategies if strategy in frechet]
    return min(measured, key=frechet.__getitem__, default="once")


def reference_of(run: Run, seen: RealRows, by: Instruments, on_progress: OnProgress) -> Reference:
    """The reference of the run's real rows, computed if none is stored. `seen`: the rows in memory, as images."""
    config, prior_CK = run.config, mixture_info(run).prior_CK
    assert prior_CK is not None
    net, real = make_reference(run, seen.train, seen.elsewhere, by, on_progress)
    every = sum(PartitionInfo.of(run.require(PARTITION)).rows_K)
    return Reference(
        net,
        real,
        seen.train,
        prior_CK.numpy(),
        config.evaluate.seed,
        labelled=bool(config.data.num_classes),
        whole_set=len(real.label_M) == every,
        embedder=by.embedder,
        captions=by.captions,
    )


def _real_lines(reference: Reference, count: int, seen: RealRows) -> list[dict[str, Any]]:
    """Lines of the table that calibrate its numbers: rows as good as any sampler's, mosaics, and noise."""
    lines = [_real_line(f"{count} drawn again", reference.drawn_again(count))]
    if (number := len(heldout := seen.heldout)) > 1:
        captions = torch.arange(number) if seen.shown is heldout else None
        held_out = reference.see(lambda: [heldout.data_NCHW], heldout.label_N if reference.labelled else captions)
        lines.append(_real_line(f"{number} drawn again", reference.drawn_again(number)))
        lines.append(_real_line(f"{number} held out", held_out))
    bad = {MOSAICS: reference.mosaics(count), NOISE: reference.noise(count)}
    return [*lines, *({"model": name} | row_of(images) for name, images in bad.items())]


def _real_line(name: str, images: ImageSet) -> dict[str, Any]:
    return {"model": f"real: {name}"} | row_of(images)


def _without_captions(config: RunConfig, by: Instruments) -> dict[str, str]:
    if config.evaluate.clip is None or by.captions is not None:
        return {}
    return {"clip": "CLIP score (the shards, of an older version, keep no captions; those of a new run do)"}


def _losses(config: RunConfig, lineup: Lineup, heldout: Rows) -> list[Loss]:
    """Held-out losses of all models with a velocity; empty if there are fewer than two held-out rows."""
    if len(heldout) < 2:
        return []
    # A guided teacher's output isn't the velocity of the data, and neither is what its student learns.
    fair: dict[str, Models] = {
        kind: models for kind, models in lineup.denses.items() if kind != "student" or not config.student.guided
    }
    strategies, seed = config.evaluate.strategies, config.evaluate.seed
    return heldout_losses(lineup.mixture, fair, heldout, strategies, seed, config.sample.router_temperature)


def _grid(config: RunConfig, lineup: Lineup, rows: Rows, request: SampleRequest, decode: Decode) -> Image.Image:
    """A few samples of each candidate below real rows of the same classes or texts."""
    shown, real, headings = shown_beside(config, rows, request)
    lines = [GridRow("real", real)]
    for candidate in lineup.candidates:
        few = candidate.sample(shown)
        lines.append(GridRow(candidate.name, decode(few.images_BCHW)))
    return grid(lines, headings)


def _versions() -> dict[str, str]:
    return {
        "ddm_ray": ddm_ray.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
