"""The plan of a request for each of its trajectories, as a table of velocities. Shapes: N velocities, K experts."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from torch import Tensor

from ddm_ray.config import SamplingSettings
from ddm_ray.core.calibration import tempered
from ddm_ray.core.guidance import scale_within
from ddm_ray.core.mixture import posterior
from ddm_ray.core.routing import Strategy
from ddm_ray.core.solver_schedule import VELOCITY, schedule
from ddm_ray.core.solvers import SOLVERS
from ddm_ray.core.times import time_grid
from ddm_ray.errors import SamplingError
from ddm_ray.sampling.request import MixtureInfo, strategy_of

PLANNED = np.dtype([(name, VELOCITY[name]) for name in VELOCITY.names or ()] + [("scale", np.float64), ("jumps", bool)])
"""A velocity, its guidance `scale`, and whether that has just changed: there the field `jumps`, as where experts do."""


@dataclass(frozen=True, eq=False)
class Rule:
    """A way to choose experts. Rows of equal `key` are routed together."""

    strategy: Strategy
    temperature: float
    available_K: Tensor | None
    prior_K: Tensor | None
    exact: bool
    """Exact guidance of the mixture: each branch under its own posterior. All else takes the conditional one's."""
    most_experts: int
    """The most experts that a velocity of one branch may take."""

    @cached_property
    def key(self) -> tuple[object, ...]:
        available = None if self.available_K is None else tuple(self.available_K.tolist())
        return self.strategy, self.temperature, available, self.exact

    def posterior(self, logits_BK: Tensor) -> Tensor:
        """p(k | x, t, c) by the router's logits, on their device."""
        return posterior(tempered(logits_BK, self.temperature), self.available_K, self.prior_K)


@dataclass(frozen=True, eq=False)
class SamplingPlan:
    """All that rows of one request have in common; `velocities` (N,) of PLANNED are in order."""

    settings: SamplingSettings
    rule: Rule
    velocities: np.ndarray

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for plans that are one, wherever they were made."""
        return self.settings, self.rule.key, self.velocities.tobytes()

    @cached_property
    def most_rows_N(self) -> np.ndarray:
        """The most rows of experts that each velocity of an image may take."""
        return self.rule.most_experts * (1 + guided(self.velocities))

    def stops(self, count: int) -> tuple[int, ...]:
        """Numbers of velocities after which a step has ended, `count` of them, evenly spread before the end."""
        ends = np.flatnonzero(self.velocities["ends"])[:-1] + 1
        chosen = np.unique(np.rint(np.arange(1, count + 1) * (len(ends) + 1) / (count + 1)).astype(int) - 1)
        return tuple(int(ends[n]) for n in chosen if 0 <= n < len(ends))

    @classmethod
    def of(cls, settings: SamplingSettings, info: MixtureInfo) -> "SamplingPlan":
        """The plan of a request with these settings to this mixture. SamplingError if K is too small for them."""
        return cls(settings, _rule(settings, info), _velocities(settings))

    @classmethod
    def at(cls, t: float, settings: SamplingSettings, info: MixtureInfo) -> "SamplingPlan":
        """One velocity at t. SamplingError for t outside [0, 1], or if K is too small for the settings."""
        if not 0 <= t <= 1:
            raise SamplingError(f"t is {t}: times are in [0, 1], 0 is data and 1 is noise")
        velocities = np.zeros(1, PLANNED)
        velocities["t"], velocities["keep"], velocities["starts"], velocities["ends"] = t, 1, True, True
        velocities["scale"] = scale_at(settings, t)
        return cls(settings, _rule(settings, info), velocities)


class Plans(tuple[SamplingPlan, ...]):
    """The plans of a state's rows, and arrays (P,) of facts about these P plans that every velocity asks for."""

    @cached_property
    def lengths(self) -> np.ndarray:
        """Velocities of each."""
        return np.array([len(plan.velocities) for plan in self])

    @cached_property
    def history(self) -> int:
        """Velocities before the present one that a state of these plans holds; one in any case, to look ahead by."""
        return max(1, *(SOLVERS[plan.settings.solver].history for plan in self))

    @cached_property
    def draws(self) -> bool:
        """True if any solver draws noise, and so scales x."""
        return any(SOLVERS[plan.settings.solver].draws for plan in self)

    @cached_property
    def begins(self) -> np.ndarray:
        """Index of the first of each among `velocities`."""
        return self.lengths.cumsum() - self.lengths

    @cached_property
    def velocities(self) -> np.ndarray:
        """All velocities, one plan's after another's."""
        if len(self) == 1:
            return self[0].velocities
        # numpy's own concatenation of records takes 100 microseconds.
        velocities = np.empty(self.lengths.sum(), PLANNED)
        for plan, begin in zip(self, self.begins, strict=True):
            velocities[begin : begin + len(plan.velocities)] = plan.velocities
        return velocities

    @cached_property
    def when(self) -> np.ndarray:
        """The time at which each chooses experts: AT_START, AT_STEP or AT_VELOCITY."""
        return np.array([_WHEN.index(plan.rule.strategy.when) for plan in self])

    @cached_property
    def exact(self) -> np.ndarray:
        """Bool: each branch under its own posterior."""
        return np.array([plan.rule.exact for plan in self])

    @cached_property
    def rules(self) -> list[tuple[Rule, np.ndarray]]:
        """Rules, and which plans (bool) are by each."""
        keys = [plan.rule.key for plan in self]
        first = {key: self[keys.index(key)].rule for key in keys}
        return [(rule, np.array([key == other for other in keys])) for key, rule in first.items()]


_WHEN = ("start", "step", "velocity")
AT_START, AT_STEP, AT_VELOCITY = range(3)


def guided(planned: np.ndarray) -> np.ndarray:
    """Bool, a value for each of these records of PLANNED: velocities that need both branches."""
    scale = planned["scale"]
    return np.asarray((scale != 0) & (scale != 1))


def scale_at(settings: SamplingSettings, t: float) -> float:
    """The guidance scale of a step that begins at t."""
    return scale_within(settings.guidance_interval, t, settings.guidance_scale)


@lru_cache(maxsize=64)
def _velocities(settings: SamplingSettings) -> np.ndarray:
    """The velocities of a plan with these settings, which all such plans share: read-only."""
    solved = schedule(SOLVERS[settings.solver], time_grid(settings.times, settings.steps))
    velocities = np.empty(len(solved), PLANNED)
    for name in VELOCITY.names or ():
        velocities[name] = solved[name]
    # As experts, guidance sets in and ends between steps, not within one.
    scale_S = np.array([scale_at(settings, t) for t in solved["t"][solved["starts"]]])
    jumps_S = np.diff(scale_S, prepend=scale_S[0]) != 0
    velocities["scale"], velocities["jumps"] = scale_S[solved["step"]], jumps_S[solved["step"]]
    velocities.setflags(write=False)
    return velocities


def _rule(settings: SamplingSettings, info: MixtureInfo) -> Rule:
    strategy = strategy_of(settings, info.num_experts)
    num_available = info.num_experts if info.available_K is None else int(info.available_K.sum())
    return Rule(
        strategy,
        settings.router_temperature,
        info.available_K,
        None if info.prior_CK is None else info.prior_CK[-1],
        strategy.when == "velocity" and settings.guidance_kind == "mixture",
        strategy.most(num_available),
    )
