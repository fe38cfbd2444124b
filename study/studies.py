"""Small runs of real training, all of it by the product itself without Ray, and variants that share their experts."""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "benchmarks")]

from claims import TRAIN, Claim, Report  # noqa: E402

from ddm_ray.config import load_recipe  # noqa: E402
from ddm_ray.data.partition.stage import partition  # noqa: E402
from ddm_ray.data.prepare.stage import prepare  # noqa: E402
from ddm_ray.data.sharded.serial import serial  # noqa: E402
from ddm_ray.evaluate.run import evaluate, read_metrics  # noqa: E402
from ddm_ray.evaluate.samples import one_thread  # noqa: E402
from ddm_ray.placement import TrainPlacement  # noqa: E402
from ddm_ray.run.graph import Artifact  # noqa: E402
from ddm_ray.run.info import TrainedInfo  # noqa: E402
from ddm_ray.run.run import Run  # noqa: E402

NAME = "study"


@dataclass(frozen=True)
class Data:
    """A data set of a study: a recipe with settings, and how many training jobs share its batch."""

    name: str
    recipe: str
    settings: tuple[str, ...]


DIGITS = Data("digits", "digits", ())
SHAPES = Data(
    "shapes",
    "digits",
    (
        "data={source: 'shapes:6000', image_size: 16, channels: 3, num_classes: 12, heldout: 0.1}",
        "embedder={kind: pixels, dim: 32}",
        "partition={num_clusters: 8, num_fine: 128}",
        "expert.model={patch_size: 4, width: 96, depth: 2, heads: 4, analytic_skip: 0.5}",
    ),
)
BY_NAME = {data.name: data for data in (DIGITS, SHAPES)}


def made(folder: Path, data: Data, settings: Sequence[str], artifacts: Iterable[Artifact]) -> Run:
    """A run at a folder with these artifacts of it trained; what is there already is left alone."""
    run = Run.create(str(folder), load_recipe(data.recipe, (*data.settings, *settings)))
    prepare(run, execute=serial)
    partition(run, with_report=False)
    return trained(run, artifacts)


def variant(base: Run, folder: Path, data: Data, settings: Sequence[str], shared: Iterable[Artifact]) -> Run:
    """Another run of the same rows, whose configuration differs, with these trained artifacts of the base."""
    run = Run.create(str(folder), load_recipe(data.recipe, (*data.settings, *settings)))
    share(base, run, (Artifact("rows"), Artifact("partition"), *shared))
    return run


def share(base: Run, run: Run, artifacts: Iterable[Artifact]) -> None:
    """Copy finished artifacts of a base run, unless they are there; they have to be what this run wants, too."""
    for artifact in artifacts:
        place = Path(run.url) / artifact
        if run.manifest(artifact) is None:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(Path(base.url) / artifact, place)
        run.require(artifact)


def trained(run: Run, artifacts: Iterable[Artifact], placement: TrainPlacement | None = None) -> Run:
    """The run with these artifacts trained, in a process of their own."""
    missing = [artifact for artifact in artifacts if not run.finished(artifact)]
    if missing:
        placed = (placement or TrainPlacement()).model_dump_json()
        command = [sys.executable, "-c", TRAIN, run.url, placed, *missing]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{run.url}: {', '.join(missing)}: {done.stderr[-2000:]}")
    return run


def kept(file: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is measured, or was measured and kept in a file."""
    if not file.exists():
        file.with_suffix(".new").write_text(json.dumps(measure()))
        file.with_suffix(".new").rename(file)
    measured: dict[str, Any] = json.loads(file.read_text())
    return measured


def add_seeds(report: Report, words: str, values: Sequence[float], target: float | None = None) -> None:
    """Add a claim to a report: the mean over seeds, and their range."""
    spread = f"({min(values):.3g} to {max(values):.3g})"
    report.add(Claim(words, statistics.mean(values), spread, target))


def metrics(run: Run) -> dict[str, Any]:
    """What an evaluation finds, by a thread."""
    with one_thread():
        evaluate(run, NAME)
    return read_metrics(run, NAME)


def flops(run: Run, artifact: Artifact) -> float:
    """FLOPs of a finished training."""
    return TrainedInfo.of(run.require(artifact)).training_flops
