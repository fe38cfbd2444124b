"""How a run samples and what its evaluation compares; the names that strategies and time grids may have."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from ddm_ray.config.part import Part

NUMBER = r"(\d+(?:\.\d+)?)"
STRATEGY = re.compile(
    r"once|full|oracle|(?:top|sample)-(?P<kept>[1-9]\d*)"
    rf"|sticky(?:-(?P<margin>{NUMBER}))?"
    rf"|threshold-(?P<least>{NUMBER})"
    rf"|nucleus-(?P<mass>{NUMBER})(?:-(?P<temperature>{NUMBER}))?"
)
TIMES = re.compile(rf"uniform|cosine|shifted-{NUMBER}")


def strategy_problem(name: str, num_clusters: int) -> str | None:
    """What is wrong with a strategy's name in a mixture of so many experts; None if nothing is.

    The grammar is that of `core.routing`, which no configuration may import.
    """
    found = STRATEGY.fullmatch(name)
    if found:
        number = {part: float(text) for part, text in found.groupdict().items() if text is not None}
        if (
            number.get("kept", 1) <= num_clusters
            and number.get("margin", 0) < 1
            and 0 < number.get("least", 0.5) < 1
            and 0 < number.get("mass", 1) <= 1
            and number.get("temperature", 1) > 0
        ):
            return None
    return (
        f"{name!r:.60} is not once, full, oracle, top-k or sample-k (k from 1 to {num_clusters}), sticky-M"
        " (M in [0, 1)), threshold-P (P in (0, 1)), nucleus-P or nucleus-P-T (P in (0, 1], T above 0)"
    )


Time = Annotated[float, Field(ge=0, le=1)]


class SampleConfig(Part):
    """Defaults for sampling from the finished mixture.

    No `strategy`: what the run's own evaluation found best, and `once` until it has one. `guidance_interval`:
    times (0 data, 1 noise) outside of which there is no guidance.
    """

    strategy: str | None = None
    solver: Literal["euler", "heun", "midpoint", "ab2"] = "ab2"
    steps: PositiveInt = 25
    times: str = "uniform"
    guidance_scale: float = 1.0
    guidance_interval: tuple[Time, Time] = (0.0, 1.0)
    guidance: Literal["mixture", "per-expert"] = "mixture"
    router_temperature: float = Field(default=1.0, gt=0)

    @field_validator("times")
    @classmethod
    def _times_have_a_grid(cls, times: str) -> str:
        found = TIMES.fullmatch(times)
        if not found or (found[1] is not None and float(found[1]) == 0):
            raise ValueError(f"{times!r:.60} is not uniform, cosine or shifted-NUMBER with a number above 0")
        return times

    @model_validator(mode="after")
    def _interval_is_in_order(self) -> Self:
        low, high = self.guidance_interval
        if low > high:
            raise ValueError(f"guidance_interval ({low}, {high}): the smaller time comes first")
        return self


class EvaluateConfig(Part):
    """What the report compares: sampling strategies beside the monolith, on the same labels and seeds."""

    strategies: tuple[str, ...] = ("once", "full", "top-1", "top-2")
    num_samples: int = Field(default=2000, ge=2)
    seed: int = Field(default=0, ge=0)
