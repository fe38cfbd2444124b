"""A study's plan: data, budgets, seeds, strategies and arms, written down before it runs and kept with its results.

An arm is the base run with something changed, as random clusters or a monolith that is told the cluster. Each arm of
each seed is trained and sampled by itself, and measured by one ruler: the features and real rows of the base's.
"""

import hashlib
import json
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

PLANS = Path(__file__).parent / "plans"
DENSE: tuple[Literal["monolith", "student"], ...] = ("monolith", "student")

Kind = Literal[
    "run",
    "told",
    "average",
    "prior",
    "steps",
    "faults",
    "guidance",
    "untold",
    "pairs",
    "copies",
    "classifier",
    "forecast",
    "agreement",
]


class Strict(BaseModel):
    """Fields by their types, and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(Strict):
    """What differs from the base, what is trained of it, and what is sampled.

    `kind`: `run` is a run with other `settings`; `told` a monolith whose condition is the cluster (with the class,
    where models are told that). What isn't trained is the base's, or that of the run that `of` names; so is all of the
    others: `average` is one network whose weights are the mean of the experts'; `prior` the experts, drawn once by the
    router at t=1 or each row's own cluster; `steps` all on their way; `faults` mixtures whose weights have a fault,
    beside sound ones; `guidance` all by several scales, under `settings` of sampling; `untold` all without the class;
    `pairs` asks how alike images of one seed are to those of the monolith that ratios are to; `copies` how many are
    nearest to a training image, of all real ones; `classifier` measures all by small classifiers. Of all runs whose
    partitions differ `forecast` asks Gaussian denoisers instead, one a cluster; `agreement` how far the clusters agree
    with the classes.
    """

    kind: Kind = "run"
    of: str = "base"
    settings: tuple[str, ...] = ()
    trains: tuple[str, ...] = Field(default=("experts", "router"), description="experts, router, monolith, student")
    strategies: tuple[str, ...] | None = Field(default=None, description="none: the study's")
    seeds: int | None = Field(default=None, ge=1, description="of the first reported seeds alone; none: of all seeds")


class Seeds(Strict):
    """Seeds on which the best strategy is chosen, and others on which it is reported."""

    choosing: tuple[int, ...]
    reported: tuple[int, ...]

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if common := {*self.choosing} & {*self.reported}:
            raise ValueError(f"seeds {sorted(common)} are chosen by and reported: these have to be others")
        return self


class Plan(Strict):
    """A study. `conditioned`: models are told the class. `steps`: of each expert, and of the monolith."""

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    question: str
    recipe: str
    settings: tuple[str, ...]
    conditioned: bool
    clusters: int = Field(ge=2)
    steps: int = Field(ge=8)
    num_samples: int = Field(ge=100)
    strategies: tuple[str, ...]
    milestones: int = Field(ge=1, description="number of equal parts of the steps after which weights are kept")
    seeds: Seeds
    arms: dict[str, Arm]
    against: str = Field(default="base/monolith", description="the monolith that all ratios are to, as ARM/NAME")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if next(iter(self.arms), None) != "base":
            raise ValueError("the first arm has to be base: others are made of its networks")
        if self.against.partition("/")[0] not in self.arms:
            raise ValueError(f"against {self.against}: there is no such arm")
        names = [*self.arms]
        for place, (name, arm) in enumerate(self.arms.items()):
            if arm.of != "base" and (arm.of not in names[:place] or self.arms[arm.of].kind != "run"):
                raise ValueError(f"arm {name} is of {arm.of!r}, which has to be a run before it")
            if arm.kind in ("guidance", "untold") and not self.conditioned:
                raise ValueError(f"arm {name} is of kind {arm.kind}: models here aren't told the class at all")
            if arm.kind == "pairs" and not self.against.endswith("/monolith"):
                raise ValueError(f"arm {name}: pairs are with a monolith, and against is {self.against}")
        if self.steps % self.milestones:
            raise ValueError(f"steps {self.steps} aren't {self.milestones} equal parts")
        return self

    @classmethod
    def read(cls, name: str) -> Self:
        """The plan of this name, or in this file. Raises ValidationError, or FileNotFoundError."""
        path = Path(name) if name.endswith(".yaml") else PLANS / f"{name}.yaml"
        return cls.model_validate_json(json_of(path))

    def arms_of(self, seed: int) -> list[str]:
        """Arms of a seed, in their order."""
        place = self.seeds.reported.index(seed) if seed in self.seeds.reported else 0
        chosen = seed in self.seeds.choosing
        return [name for name, arm in self.arms.items() if arm.seeds is None or (not chosen and place < arm.seeds)]

    def strategies_of(self, arm: Arm) -> tuple[str, ...]:
        """The strategies that an arm is sampled by."""
        return self.strategies if arm.strategies is None else arm.strategies

    @property
    def partitions(self) -> list[str]:
        """The base and the arms that have a partition of their own."""
        own = (name for name, arm in self.arms.items() if any(each.startswith("partition.") for each in arm.settings))
        return [*dict.fromkeys(("base", *own))]

    def digest(self, arm: str) -> str:
        """SHA-256 of what an arm's result depends on: its fields, those of whose networks it takes, and the study's."""
        fields = self.model_dump(mode="json", exclude={"name", "question", "seeds", "arms", "against"})
        # Whose clusters or networks it has beside those of `of`.
        also = {"pairs": [self.against.partition("/")[0], "base"], "copies": ["base"]}
        also |= dict.fromkeys(("forecast", "agreement"), self.partitions)
        own = self.arms.get(arm)
        names = dict.fromkeys((arm, own.of, *also.get(own.kind, ()))) if own else ()
        used = [self.arms[each] for each in names]
        dumped = [each.model_dump(mode="json", exclude={"seeds"}) for each in used]
        return hashlib.sha256(json.dumps([fields, dumped], sort_keys=True).encode()).hexdigest()

    def run_settings(self, seed: int) -> list[str]:
        """Settings of the base run of a seed, beside the recipe."""
        dropped = [] if self.conditioned else [f"{part}.train.condition_dropout=1.0" for part in ("expert", "router")]
        own = {"partition.num_clusters": self.clusters, "partition.seed": seed}
        own |= {"evaluate.seed": seed, "evaluate.num_samples": self.num_samples}
        for part in ("expert", "router"):
            own |= {f"{part}.train.steps": self.steps, f"{part}.train.seed": seed}
        return [*self.settings, *(f"{name}={value}" for name, value in own.items()), *dropped]


def json_of(path: Path) -> str:
    """A YAML file as JSON, so that numbers and lists are of JSON's types."""
    return json.dumps(yaml.safe_load(path.read_text()))
