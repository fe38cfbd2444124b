"""What faults cost: goodput, and the Young/Daly optimum that checkpoints could reach at best. Times in seconds."""

import math
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Hit:
    """A fault that hit an expert `at` so many seconds: until its next step, and steps it had to do again.

    `beside`: whether the other expert trained then, which `other_went_on` with the attempt that it had.
    """

    fault: str
    expert: str
    at: float
    until_step: float
    lost_steps: int
    beside: bool
    other_went_on: bool


@dataclass(frozen=True)
class Costs:
    """A step, what training waits for a checkpoint, the interval between two, and a fault but for steps done again."""

    step: float
    checkpoint: float
    interval: float
    recovery: float

    def best_interval(self, between: float) -> float:
        """Young's interval: sqrt(2 checkpoint between) (Young 1974, Daly 2006), at least a step."""
        return max(self.step, math.sqrt(2 * self.checkpoint * between))

    def best_goodput(self, between: float) -> float:
        """Useful share of the time at the best interval, a fault every `between` seconds, to first order."""
        interval = self.best_interval(between)
        return max(0.0, 1 - self.checkpoint / interval - (self.recovery + interval / 2) / between)


def fault_seconds(hits: list[Hit], step_seconds: float) -> float:
    """Mean time that a fault threw an expert back: until its next step, and until it was where it had been."""
    return fmean(hit.until_step + hit.lost_steps * step_seconds for hit in hits)
