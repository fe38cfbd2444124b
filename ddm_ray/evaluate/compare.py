"""Compare finished evaluations of several runs: measure their images against one reference, with intervals.

Samples nothing: it reads the images that the evaluations stored. Shapes: M images, CHW image, S shown ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ddm_ray.config import EmbedderConfig
from ddm_ray.data import OnProgress, no_progress, phase
from ddm_ray.data.sharded.kept_records import KeptRecords
from ddm_ray.errors import CorruptArtifact, SamplingError
from ddm_ray.evaluate.candidates import decoder
from ddm_ray.evaluate.features import features_in_words, load_embedder
from ddm_ray.evaluate.image_set import PulledDistance
from ddm_ray.evaluate.measure import reference_of
from ddm_ray.evaluate.metrics import Difference, row_of
from ddm_ray.evaluate.real_rows import RealRows
from ddm_ray.evaluate.reference import Instruments
from ddm_ray.evaluate.run import read_metrics
from ddm_ray.evaluate.samples import CandidateSamples, SamplesPlan, SamplesRecord, SamplesStore, here, one_thread
from ddm_ray.pictures.grid import GridRow, grid
from ddm_ray.pictures.png import to_png
from ddm_ray.run.graph import EXTRAS, evaluation
from ddm_ray.run.run import Run

SHOWN_CLASSES, SHOWN_EACH = 10, 3


@dataclass(frozen=True)
class Side:
    """One evaluation of a run. `name` labels its lines."""

    run: Run
    evaluation: str
    name: str

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The contents of its metrics.json."""
        return read_metrics(self.run, self.evaluation)

    def sampled(self) -> list[CandidateSamples]:
        """The samples of its candidates. Raises CorruptArtifact, also if an older version stored none."""
        artifact = evaluation(self.evaluation)
        chunks = SamplesStore(self.run, artifact, SamplesPlan, SamplesRecord)
        self.run.require(artifact)
        plan = chunks.begun()
        if plan is None:
            raise CorruptArtifact(
                f"{chunks.url}: keeps no samples: an older version made it", self.run.remake(artifact)
            )
        records = [*KeptRecords.of(chunks)]
        chunks.require_complete(plan, records)
        return [CandidateSamples(chunks, plan, records, row["model"]) for row in self.metrics["models"]]

    def sampling(self, candidate: str) -> dict[str, Any]:
        """The settings under which a candidate was sampled."""
        return next(row["sampling"] for row in self.metrics["models"] if row["model"] == candidate)

    def training_flops(self, candidate: str) -> float:
        """FLOPs of all training that a candidate needs, the teachers of a student included."""
        training = self.metrics["training"]
        flops = {job["job"]: job["flops"] for job in training["jobs"]}
        if candidate == "monolith":
            return float(flops[candidate])
        student = flops["student"] if candidate == "student" else 0.0
        return training["experts_flops"] + student + (0.0 if candidate in (*EXTRAS, "once") else flops["router"])


@dataclass(frozen=True)
class Comparison:
    """One line per candidate (name, score, costs, settings), differences from the first line, and a grid as PNG.

    `paired`: names of the lines with the same labels and seeds as the first line; their differences are paired.
    """

    num_samples: int
    num_real: int
    features: str
    lines: list[dict[str, Any]]
    differences: list[Difference]
    paired: list[str]
    grid_png: bytes

    def as_json(self) -> dict[str, Any]:
        """All fields but the picture."""
        return {name: value for name, value in asdict(self).items() if name != "grid_png"}


def compare(
    sides: Sequence[Side],
    only: Sequence[str] = (),
    on_progress: OnProgress = no_progress,
    device: str = "cpu",
    features: EmbedderConfig | None = None,
) -> Comparison:
    """Measure all candidates, or those named in `only`, in that order, against the first side's real rows.

    `features`: the network that gives the features; None: that of the first run's evaluations. If evaluations differ
    in their number of samples, the first samples of each are used. Features of the real rows are stored in the first
    run. Raises SamplingError for runs on different data, or if there is nothing to compare; MissingArtifact,
    CorruptArtifact, DriftError.
    """
    first = sides[0].run
    for side in sides[1:]:
        if (ours := side.run.config.data) != first.config.data:
            other = [name for name, value in ours if value != getattr(first.config.data, name)]
            raise SamplingError(
                f"{side.run.url} and {first.url}: data.{other[0]} differs, so there is no one set of real rows to"
                " compare with; compare runs of the same data"
            )
    names = sorted({row["model"] for side in sides for row in side.metrics["models"]})
    if unknown := [name for name in only if name not in names]:
        raise SamplingError(f"no model {unknown[0]!r} among these evaluations: there are {', '.join(names)}")
    chosen = [(side, each) for side in sides for each in side.sampled() if not only or each.candidate in only]
    if only:
        chosen.sort(key=lambda pair: only.index(pair[1].candidate))
    if len(chosen) < 2:
        raise SamplingError(f"{len(chosen)} models to compare: name two or more of {', '.join(names)}, or none of them")
    count = min(len(each.number_M) for _, each in chosen)
    with one_thread():
        on_progress(0.0, "reading real rows")
        features = features or first.config.evaluate.features
        by = Instruments(decoder(first, device), load_embedder(features, device), here(device), device)
        seen = RealRows.of(first, device).decoded(by.decode)
        evaluating = first.config.evaluate.model_copy(update={"features": features})
        measuring = Run(first.store, first.config.model_copy(update={"evaluate": evaluating}))
        reference = reference_of(measuring, seen, by, phase(on_progress, 0.0, 0.1))
        distances: dict[str, PulledDistance] = {}
        lines: list[dict[str, Any]] = []
        shown, paired = list[GridRow](), list[str]()
        baseline_side, baseline = chosen[0]
        for number, (side, sampled) in enumerate(chosen):
            name = f"{side.name}: {sampled.candidate}" if len(sides) > 1 else sampled.candidate
            on_progress(0.1 + 0.9 * number / len(chosen), f"measuring {name}")
            number_M = sampled.number_M[:count]
            images = reference.see(partial(_first, sampled, count), number_M)
            distances[name] = images.distance
            line = {"model": name} | row_of(images) | sampled.costs()
            del images  # so that the features of only one candidate are in memory
            line |= {
                "training_flops": side.training_flops(sampled.candidate),
                "sampling": side.sampling(sampled.candidate),
            }
            lines.append(line)
            if side.metrics["seed"] == baseline_side.metrics["seed"] and torch.equal(
                number_M, baseline.number_M[:count]
            ):
                paired.append(name)
            shown.append(GridRow(name, _shown(sampled, baseline.number_M[:count])))
    lined = list(distances)
    differences = [Difference.of((name, lined[0]), distances[name], distances[lined[0]]) for name in lined[1:]]
    classes = first.named.data.class_names
    alike = first.config.data.num_classes and len(paired) == len(lined)
    headings = [classes[label] for label in _classes(baseline.number_M[:count])] if alike else []
    words = features_in_words(features, reference.num_features)
    picture = to_png(grid(shown, headings))
    return Comparison(count, reference.real.rows, words, lines, differences, paired, picture)


def _first(sampled: CandidateSamples, count: int) -> Iterator[Tensor]:
    """Yield the first `count` images, part by part."""
    for part_BCHW in sampled.images():
        yield part_BCHW[:count]
        count -= len(part_BCHW)
        if count <= 0:
            return


def _classes(number_M: Tensor) -> list[int]:
    labels: list[int] = number_M.unique(sorted=True)[:SHOWN_CLASSES].tolist()
    return labels


def _shown(sampled: CandidateSamples, number_M: Tensor) -> Tensor:
    """The first images of each shown condition. The places are the same for every candidate."""
    places = torch.cat([torch.nonzero(number_M == label)[:SHOWN_EACH, 0] for label in _classes(number_M)])
    image_by_place: dict[int, Tensor] = {}
    first, all_places = 0, {*places.tolist()}
    for part_BCHW in sampled.images():
        image_by_place |= {
            place: part_BCHW[place - first] for place in all_places if 0 <= place - first < len(part_BCHW)
        }
        first += len(part_BCHW)
        if len(image_by_place) == len(all_places):
            break
    return torch.stack([image_by_place[place] for place in places.tolist()])
