"""The trend of a network's loss on held-out rows, and by which numbers a training is undertrained or overfits.

M measurements, G groups of held-out rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddm_ray.config import RunConfig
from ddm_ray.config.longer import Part, lengthened
from ddm_ray.errors import ConfigError
from ddm_ray.remedies import Begin, Extend, Fix
from ddm_ray.storage.graph import Artifact, part_of
from ddm_ray.storage.info import HeldoutInfo, TrainedInfo

GROUPS = 8
"""Groups of held-out rows (G), each with a mean of its own: by how these differ a mean's standard error is known."""
STEPS, DRAWS, LOSSES = "heldout_step", "heldout_draws", "heldout"
"""Names in a training's curve: steps done at each measurement, its draws, its groups' mean losses (M x G, flat)."""
LAST_QUARTER = 0.75
STILL_FALLS = 0.06
"""Share of a loss: undertrained is what had both losses, in training and held out, fall by more in the last quarter.

Not of one alone: the average that is measured lags, and falls on when what is averaged is done with it.
"""
STILL_INITIAL = 0.1
"""Share in the average that is published: undertrained is where the random weights that it began with have more."""
RISES = 0.03
"""Share of the lowest held-out loss: what ends further above it overfits, if the loss in training fell meanwhile."""
CERTAIN = 2.5
"""Standard errors that a fall or rise must be as well: of the same rows' losses, with the same noise and times."""
TIMES_LONGER, ADVISED_INITIAL = 2, 0.05
"""Steps advised for what is undertrained, over those that it had; more until the random weights have so small a share.
"""

Finding = Literal["undertrained", "overfits"]


@dataclass(frozen=True)
class Verdict:
    """A plain word on a training, the numbers that are its ground in words, and what may mend it."""

    finding: Finding
    ground: str
    fix: Fix | None = None

    def text(self, phrase: Callable[[Fix], str] = str) -> str:
        """The verdict as one clause, with what may mend it as `phrase` has it."""
        return f"{self.finding}: {self.ground}" + (f"; {phrase(self.fix)}" if self.fix else "")


def verdict_of(run_url: str, config: RunConfig, artifact: Artifact, info: TrainedInfo) -> Verdict | None:
    """The verdict on a finished training of the run at a URL; None where its numbers give no ground for one."""
    trend = info.heldout
    if trend is None or (finding := finding_of(trend)) is None:
        return None
    part = part_of(artifact)
    if finding != "undertrained" or part is None:
        return Verdict(finding, ground(trend))
    return Verdict(finding, ground(trend), longer(run_url, config, part, more_steps(info.step, trend)))


def finding_of(trend: HeldoutInfo) -> Finding | None:
    """The plain word for a trend, if there is one."""
    if trend.initial > STILL_INITIAL:
        return "undertrained"
    if min(trend.fall, trend.trained_since) > STILL_FALLS and trend.fall > CERTAIN * trend.fall_error:
        return "undertrained"
    if trend.rise > RISES and trend.rise > CERTAIN * trend.rise_error and trend.trained_since_lowest > 0:
        return "overfits"
    return None


def ground(trend: HeldoutInfo) -> str:
    """Words on the numbers by which a trend has its plain word; empty where it has none."""
    match finding_of(trend):
        case "undertrained" if trend.initial > STILL_INITIAL:
            return f"the weights that it began with are still {trend.initial:.0%} of the average that is published"
        case "undertrained":
            change = f"{trend.fall:.1%} ± {trend.fall_error:.1%}"
            return (
                f"over the last {trend.step - trend.since:,} steps its loss still fell by {change} on held-out rows, by"
                f" {trend.trained_since:.1%} in training"
            )
        case "overfits":
            change = f"{trend.rise:.1%} ± {trend.rise_error:.1%}"
            return (
                f"its held-out loss rose by {change} from step {trend.lowest:,} on, while that in training fell by"
                f" {trend.trained_since_lowest:.1%}"
            )
    return ""


def trend_of(curve: Mapping[str, Sequence[float]], initial: float = 0.0) -> HeldoutInfo | None:
    """The trend by a training's curve; None where held-out rows weren't measured in time.

    `initial`: see HeldoutInfo.
    """
    steps, losses_MG = measurements(curve)
    if not steps or not all(math.isfinite(loss) for losses_G in losses_MG for loss in losses_G):
        return None
    means = [_mean(losses_G) for losses_G in losses_MG]
    since = min(range(max(1, len(steps) - 1)), key=lambda number: abs(steps[number] - LAST_QUARTER * steps[-1]))
    lowest = min(range(len(means)), key=means.__getitem__)
    if not (means[since] > 0 and means[lowest] > 0):
        return None
    last_G = losses_MG[-1]
    fall_G = [before - now for before, now in zip(losses_MG[since], last_G, strict=True)]
    rise_G = [now - before for before, now in zip(losses_MG[lowest], last_G, strict=True)]
    return HeldoutInfo(
        step=int(steps[-1]),
        loss=means[-1],
        error=_error(last_G),
        since=int(steps[since]),
        fall=_mean(fall_G) / means[since],
        fall_error=_error(fall_G) / means[since],
        trained_since=_trained_fall(curve["loss"], int(steps[since]), int(steps[-1])),
        lowest=int(steps[lowest]),
        rise=_mean(rise_G) / means[lowest],
        rise_error=_error(rise_G) / means[lowest],
        trained_since_lowest=_trained_fall(curve["loss"], int(steps[lowest]), int(steps[-1])),
        initial=initial,
    )


def measurements(curve: Mapping[str, Sequence[float]]) -> tuple[list[float], list[Sequence[float]]]:
    """Steps (M) and losses_MG of the measurements in a training's curve; empty where there is none."""
    steps, flat = list(curve.get(STEPS, ())), curve.get(LOSSES, ())
    if len(flat) != GROUPS * len(steps):
        return [], []
    return steps, [flat[GROUPS * number : GROUPS * (number + 1)] for number in range(len(steps))]


def mean_and_error(losses_G: Sequence[float]) -> tuple[float, float]:
    """The mean of groups' losses and its standard error."""
    return _mean(losses_G), _error(losses_G)


def more_steps(step: int, trend: HeldoutInfo | None = None) -> int:
    """Number of steps that is advised where `step` were too few."""
    times = TIMES_LONGER
    if trend is not None and STILL_INITIAL < trend.initial < 1:
        times = max(times, math.ceil(math.log(ADVISED_INITIAL) / math.log(trend.initial)))
    return times * step


def longer(run_url: str, config: RunConfig, part: Part, steps: int) -> Begin:
    """Advice to train a part for so many steps: in an extension of the run, or where that can't be in another run."""
    field = f"{part}.train.steps"
    try:
        lengthened(config, {part: steps})
    except ConfigError:
        return Begin("", field, str(steps))
    return Extend(run_url, field, str(steps))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _error(values: Sequence[float]) -> float:
    mean, count = _mean(values), len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


def _trained_fall(losses: Sequence[float], since: int, last: int) -> float:
    """Share by which the training loss of the steps before `last` is below that of as many before `since`."""
    window = min(since, last - since)
    if window < 2 or last > len(losses):
        return 0.0
    before, after = losses[since - window : since], losses[last - window : last]
    fall, uncertain = _mean(before) - _mean(after), math.hypot(_error(before), _error(after))
    return fall / _mean(before) if fall > CERTAIN * uncertain and _mean(before) > 0 else 0.0
