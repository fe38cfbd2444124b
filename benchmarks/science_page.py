"""Writes docs/science.md and its figures from what the studies measured: no number of the page is typed.

`python benchmarks/science_page.py` reads docs/science/*.json, fills in science.md.jinja, and draws the figures. Ratios
are of two candidates of the same seed, since these were trained on the same rows in the same order; the mean and the
95 % interval are of their logarithms, by Student's t over the seeds.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jinja2 import Environment, StrictUndefined
from scipy.stats import t as student_t

ROOT = Path(__file__).parents[1]
MEASURED, PAGE, TEMPLATE = ROOT / "docs/science", ROOT / "docs/science.md", Path(__file__).with_name("science.md.jinja")
MONOLITH = "base/monolith"


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
        return f"{self.mean:.2f}" + (f" ({self.low:.2f} to {self.high:.2f})" if self.count > 1 else " (one seed)")


@dataclass(frozen=True)
class Study:
    """What was measured of a study. A candidate is named by its arm: `base/once`."""

    measured: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a file of `science.py`."""
        return cls(json.loads(path.read_text()))

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

    def ratio(self, candidate: str, against: str = MONOLITH, seeds: str = "reported") -> Ratio:
        """The candidate's Frechet distance over another's, on the seeds that have both."""
        own, other = self.values(candidate, seeds=seeds), self.values(against, seeds=seeds)
        return Ratio.of([own[seed] / other[seed] for seed in own if seed in other])

    @property
    def best(self) -> str:
        """The strategy with the least distance on the seeds that are for choosing."""
        return min(self.plan["strategies"], key=lambda each: self.ratio(f"base/{each}", seeds="choosing").mean)

    def loss(self, candidate: str) -> float | None:
        """Mean held-out loss over the monolith's; None where it isn't defined, as of what draws an expert once."""
        arm, name = candidate.split("/", 1)
        every = [self.measured["seeds"][str(seed)] for seed in self.plan["seeds"]["reported"]]
        losses = [
            arms[arm]["losses"][name]["loss"] / arms["base"]["losses"]["monolith"]["loss"]
            for arms in every
            if name in arms.get(arm, {}).get("losses", {})
        ]
        return statistics.mean(losses) if losses else None

    def flops(self, candidate: str) -> float:
        """FLOPs of the arm's own trainings over the monolith's, of the first reported seed."""
        arm, name = candidate.split("/", 1)
        arms = self.measured["seeds"][str(self.plan["seeds"]["reported"][0])]
        monolith, own = arms["base"]["flops"]["monolith"], arms[arm].get("flops", arms["base"]["flops"])
        dense = name.split("@")[0] in ("monolith", "told", "student")
        chosen = [flops for job, flops in own.items() if (job in ("monolith", "student")) == dense]
        return sum(chosen) / monolith

    def sooner(self, strategy: str) -> Ratio:
        """How many times fewer steps the mixture takes to the monolith's last distance; at the milestones between, by
        the logarithms' line. A seed that never reaches it counts as 1.
        """
        part = self.plan["steps"] // self.plan["milestones"]
        steps = range(part, self.plan["steps"] + 1, part)
        curves = {at: self.values(f"steps/{strategy}@{at}" if at < steps[-1] else f"base/{strategy}") for at in steps}
        goals = self.values(MONOLITH)
        return Ratio.of(
            [
                steps[-1] / _reached({at: curve[seed] for at, curve in curves.items()}, goal)
                for seed, goal in goals.items()
            ]
        )


def _reached(curve: dict[int, float], goal: float) -> float:
    """The step at which a curve falls to the goal, between two milestones by the line through the logarithms."""
    before: tuple[int, float] | None = None
    for at, distance in curve.items():
        if distance <= goal:
            if before is None:
                return float(at)
            (start, from_), span = before, math.log(before[1] / distance)
            return start + (at - start) * math.log(from_ / goal) / span
        before = at, distance
    return float(max(curve))


def table(study: Study) -> str:
    """All candidates of a study, as a Markdown table."""
    rows = [
        "| arm | candidate | Frechet distance | over the monolith's | precision | recall | loss over the monolith's |"
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
            f" {'' if loss is None else f'{loss:.3f}'} |"
        )
    return "\n".join(rows)


def rendered(measured: Path = MEASURED) -> str:
    """The page, from what was measured."""
    studies = {path.stem: Study.read(path) for path in sorted(measured.glob("*.json"))}
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(TEMPLATE.read_text()).render(studies=studies, table=table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    PAGE.write_text(rendered())


if __name__ == "__main__":
    main()
