"""Statistics of a study: ratios with intervals, and a table of all candidates.

Ratios are of two candidates of the same seed, since these were trained on the same rows in the same order; the mean and
the 95 % interval are of their logarithms, by Student's t over the seeds. Each seed has its own clusters, too.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from scipy.stats import t as student_t

MEASURED = Path(__file__).parent / "measured"


@dataclass(frozen=True)
class Ratio:
    """A mean ratio over `count` seeds, and the ends of its 95 % interval; of one seed without."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Self:
        """Of each seed's ratio, all above 0."""
        logs = [math.log(each) for each in ratios]
        mean, count = statistics.mean(logs), len(logs)
        half = math.inf if count < 2 else float(student_t.ppf(0.975, count - 1)) * statistics.stdev(logs) / count**0.5
        return cls(math.exp(mean), math.exp(mean - half), math.exp(min(mean + half, 700.0)), count)

    def __str__(self) -> str:
        if self.count == 1:
            return f"{self.mean:.2f} (one seed)"
        ends = (f"{each:.{self._digits(each)}f}" for each in (self.low, self.high))
        return f"{self.mean:.2f} ({' to '.join(ends)}, {self.count} seeds)"

    def _digits(self, end: float) -> int:
        """Two, and more for an end of an interval that rounds to 1, until they tell on which side it is."""
        return next((count for count in range(2, 6) if round(end, count) != 1 and self.low < self.high), 2)


@dataclass(frozen=True)
class Study:
    """What was measured of a study. A candidate is named by its arm: `base/once`."""

    measured: dict[str, Any]

    @classmethod
    def read(cls, name: str) -> Self:
        """That of this name, as far as it was measured."""
        path = MEASURED / f"{name}.json"
        return cls(json.loads((path if path.exists() else path.with_suffix(".partial.json")).read_text()))

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, as it was before the runs."""
        plan: dict[str, Any] = self.measured["plan"]
        return plan

    @property
    def candidates(self) -> list[str]:
        """All candidates of the first reported seed, in their order."""
        arms = self.measured["seeds"][str(self.plan["seeds"]["reported"][0])]
        return [f"{arm}/{name}" for arm, result in arms.items() for name in result["candidates"]]

    def values(self, candidate: str, field: str = "frechet", seeds: str = "reported") -> dict[int, float]:
        """A field of a candidate's score, by those of these seeds that have it."""
        arm, name = candidate.split("/", 1)
        every = {seed: self.measured["seeds"][str(seed)] for seed in self.plan["seeds"][seeds]}
        return {seed: arms[arm]["candidates"][name][field] for seed, arms in every.items() if arm in arms}

    def mean(self, candidate: str, field: str = "frechet") -> float:
        """The mean of a field over the reported seeds that have the candidate."""
        return statistics.mean(self.values(candidate, field).values())

    def ratio(
        self, candidate: str, against: str | None = None, field: str = "frechet", seeds: str = "reported"
    ) -> Ratio:
        """A candidate's field over another's (None: the plan's monolith's), on the seeds that have both."""
        own = self.values(candidate, field, seeds)
        other = self.values(against or self.plan["against"], field, seeds)
        return Ratio.of([own[seed] / other[seed] for seed in own if seed in other])

    @property
    def best(self) -> str:
        """The strategy with the least distance on the seeds that are for choosing."""
        return min(self.plan["strategies"], key=lambda each: self.ratio(f"base/{each}", seeds="choosing").mean)

    def loss(self, candidate: str) -> Ratio | None:
        """Held-out loss over base/monolith's; None where it isn't defined, as of what draws an expert once."""
        ratios = [own["loss"] / other["loss"] for own, other in self._losses(candidate)]
        return Ratio.of(ratios) if ratios else None

    def loss_by_noise(self, candidate: str) -> list[float]:
        """Mean held-out loss over base/monolith's in each tenth of t, from data to noise."""
        ratios = [
            [a / b for a, b in zip(own["by_t"], other["by_t"], strict=True)] for own, other in self._losses(candidate)
        ]
        return [statistics.mean(each) for each in zip(*ratios, strict=True)]

    def _losses(self, candidate: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        arm, name = candidate.split("/", 1)
        every = [self.measured["seeds"][str(seed)] for seed in self.plan["seeds"]["reported"]]
        return [
            (arms[arm]["losses"][name], arms["base"]["losses"]["monolith"])
            for arms in every
            if name in arms.get(arm, {}).get("losses", {})
        ]

    def others(self, arm: str, field: str) -> list[dict[str, Any]]:
        """What an arm has beside its candidates, of each reported seed that has the arm."""
        every = [self.measured["seeds"][str(seed)] for seed in self.plan["seeds"]["reported"]]
        return [arms[arm][field] for arms in every if arm in arms]

    def flops(self, arm: str, *networks: str) -> float:
        """Training FLOPs of networks of an arm, whose names begin so, over base/monolith's, on the first seed."""
        arms = self.measured["seeds"][str(self.plan["seeds"]["reported"][0])]
        own = [flops for name, flops in arms[arm]["flops"].items() if name.startswith(networks)]
        return float(sum(own) / arms["base"]["flops"]["monolith"])

    def curves(self, candidate: str) -> dict[int, dict[int, float]]:
        """By seed, the distance of a candidate after each part of the steps, and after the last."""
        part, last = self.plan["steps"] // self.plan["milestones"], self.plan["steps"]
        own, name = candidate.split("/", 1)
        arm = next(arm for arm, each in self.plan["arms"].items() if each["kind"] == "steps" and each["of"] == own)
        curves: dict[int, dict[int, float]] = {}
        for at in range(part, last + 1, part):
            for seed, distance in self.values(f"{arm}/{name}@{at}" if at < last else candidate).items():
                curves.setdefault(seed, {})[at] = distance
        return {seed: curve for seed, curve in curves.items() if part in curve}

    def sooner(self, strategy: str) -> "Sooner":
        """How many times fewer steps the mixture takes to the monolith's last distance, and stays below it."""
        return self._sooner(self.curves(f"base/{strategy}"), self.plan["against"], self.plan["steps"])

    def sooner_by(self, candidates: Mapping[int, str], goal: str) -> "Sooner":
        """The same of candidates by their steps, to the distance of a monolith of as many steps as their most.

        Of a seed whose candidate of the fewest steps is there already that is a bound.
        """
        values = {at: self.values(candidate) for at, candidate in sorted(candidates.items())}
        curves = {seed: {at: distances[seed] for at, distances in values.items()} for seed in self.values(goal)}
        return self._sooner(curves, goal, max(candidates))

    def _sooner(self, curves: Mapping[int, dict[int, float]], goal: str, last: int) -> "Sooner":
        goals = self.values(goal)
        reached = {seed: _reached(curve, goals[seed]) for seed, curve in curves.items()}
        ratios = [last / at for at in reached.values() if at is not None]
        return Sooner(Ratio.of(ratios) if len(ratios) == len(curves) else None, len(ratios), len(curves))


@dataclass(frozen=True)
class Sooner:
    """A ratio of steps, where all seeds reach the monolith's last distance; `reached` of `count` do."""

    ratio: Ratio | None
    reached: int
    count: int

    def __str__(self) -> str:
        return str(self.ratio) if self.ratio else f"not by all: {self.reached} of {self.count} seeds"


def _reached(curve: dict[int, float], goal: float) -> float | None:
    """The step from which on a curve is at or below the goal at each milestone; None if it isn't at the last one.

    Between two milestones it is on the line through the logarithms. Of a noisy curve it is not the first time below:
    that one is chance as often as not.
    """
    above = [at for at, distance in curve.items() if distance > goal]
    if not above:
        return float(min(curve))
    last, *after = (at for at in curve if at >= above[-1])
    if not after:
        return None
    span = math.log(curve[last] / curve[after[0]])
    return last + (after[0] - last) * math.log(curve[last] / goal) / span


def table(study: Study) -> str:
    """All candidates of a study, as a Markdown table."""
    rows = [
        "| arm | candidate | Frechet distance | over the monolith's | precision | recall | loss over base/monolith's |"
    ]
    rows += ["|---|---|---|---|---|---|---|"]
    for candidate in study.candidates:
        arm, name = candidate.split("/", 1)
        if "@" in name:
            continue
        loss = study.loss(candidate)
        rows.append(
            f"| {arm} | {name} | {study.mean(candidate):.3g} | {study.ratio(candidate)} |"
            f" {study.mean(candidate, 'precision'):.2f} | {study.mean(candidate, 'recall'):.2f} |"
            f" {'' if loss is None else f'{loss.mean:.3f}'} |"
        )
    return "\n".join(rows)
