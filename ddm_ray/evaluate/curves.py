"""Training curves of the evaluated models: training loss and held-out loss.

Shapes: M measurements of the held-out loss.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from safetensors import SafetensorError

from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.jobs.published import Weights
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.spelling import numbered
from ddm_ray.train.heldout import GROUPS, measurements
from ddm_ray.train.state import CURVE, read_curve

POINTS = 60
"""Points of a curve of the training loss. Each is the mean over equally many steps."""
MAX_MEASUREMENTS = 10_000
"""Maximum measurements of a curve: each extension of a run adds some."""


@dataclass(frozen=True)
class Curve:
    """Steps and mean losses, of stretches of the training and of measurements on held-out rows."""

    steps: Sequence[float]
    losses: Sequence[float]
    heldout_steps: Sequence[float]
    heldout: Sequence[float]

    @classmethod
    def of(cls, curve: Mapping[str, Sequence[float]]) -> Self:
        """Thin out the curve that a training job stores."""
        losses = curve.get("loss", ())
        each = math.ceil(len(losses) / POINTS) or 1
        parts = [losses[first : first + each] for first in range(0, len(losses), each)]
        ends = [min(first + each, len(losses)) for first in range(0, len(losses), each)]
        measured, losses_MG = measurements(curve)
        means = [math.fsum(part) / len(part) for part in parts]
        return cls(ends, means, measured, [math.fsum(losses_G) / GROUPS for losses_G in losses_MG])

    @classmethod
    def mean(cls, curves: Sequence["Curve"]) -> Self:
        """The mean of several curves, at each step where all curves that reached it have a point."""
        steps, losses = _mean([(each.steps, each.losses) for each in curves])
        return cls(steps, losses, *_mean([(each.heldout_steps, each.heldout) for each in curves]))


def training_curves(run: Run, artifacts: Sequence[Artifact], milestones: Mapping[Artifact, Weights]) -> dict[str, Any]:
    """The training curves by kind, as JSON: for experts their mean, nothing for a kind without stored curves.

    Experts that learn different flows have losses in different units: there is a mean for each flow, `experts 0, 2`.
    `milestones`: the weights of jobs that are still training.
    """
    by_name: dict[str, list[Curve]] = {}
    for artifact in artifacts:
        # A curve is for display only: a damaged one mustn't stop the evaluation.
        with suppress(CorruptArtifact, DriftError):
            weights = milestones.get(artifact) or Weights.finished(run, artifact)
            by_name.setdefault(_name(run, artifact), []).append(Curve.of(_read(run, weights)))
    return {name: vars(Curve.mean(curves)) for name, curves in by_name.items()}


def _name(run: Run, artifact: Artifact) -> str:
    """The kind, or the numbers of the experts that learn the same flow, if not all do."""
    config, clusters = run.config, run.config.partition.clusters
    alike = [each for each in clusters if config.flow_of(each) == config.flow_of(artifact.cluster)]
    apart = artifact.kind == "expert" and len(alike) < len(clusters)
    return numbered(artifact.kind, alike) if apart else artifact.kind


def _read(run: Run, weights: Weights) -> dict[str, list[float]]:
    """Read the curve stored beside published weights. Raises CorruptArtifact if it is missing or not numeric."""
    (data,) = weights.read(run, {CURVE: 8 * (4 * weights.step + (GROUPS + 2) * MAX_MEASUREMENTS)})
    try:
        curve = read_curve(data)
    except SafetensorError as error:
        raise CorruptArtifact(f"{weights.artifact}: {error}") from None
    if not all(isinstance(value, float) and math.isfinite(value) for values in curve.values() for value in values):
        raise CorruptArtifact(f"{weights.artifact}: its training curve has values that aren't finite numbers")
    return curve


def _mean(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[list[float], list[float]]:
    at: dict[float, list[float]] = {}
    for steps, losses in curves:
        for step, loss in zip(steps, losses, strict=True):
            at.setdefault(step, []).append(loss)
    reached = {step: sum(bool(steps) and steps[-1] >= step for steps, _ in curves) for step in at}
    shared = [step for step in sorted(at) if len(at[step]) == reached[step]]
    return shared, [math.fsum(at[step]) / len(at[step]) for step in shared]
