"""The learning rate of every step of a training."""

import math

from ddm_ray.core.names import ScheduleName


def learning_rate(
    step: int, *, schedule: ScheduleName, base: float, final: float, warmup_steps: int, steps: int
) -> float:
    """The rate of `step` (0 .. steps - 1): base (step + 1) / warmup_steps at first, then as `schedule` says.

    cosine (arXiv 1608.03983, eq. 5) and linear fall from `base`, the warm-up's last rate, to exactly `final` at the
    last step; inverse-sqrt is base sqrt(warmup_steps / (step + 1)), the warm-up being one step at least (arXiv
    1706.03762, eq. 3).
    """
    # The step at which the warm-up ends: the first one where there is none.
    peak = max(warmup_steps, 1) - 1
    if step < peak:
        return base * ((step + 1) / warmup_steps)
    if step == peak or schedule == "constant":
        return base
    if schedule == "inverse-sqrt":
        return base * math.sqrt((peak + 1) / (step + 1))
    past = min((step - peak) / max(steps - 1 - peak, 1), 1.0)
    left = 1 - past if schedule == "linear" else (1 + math.cos(math.pi * past)) / 2
    return final + (base - final) * left
