"""Learning rates against closed forms and torch's own schedulers."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.core.names import ScheduleName
from ddm_ray.core.schedules import learning_rate

SCHEDULES = get_args(ScheduleName)
FALLING = ("cosine", "linear")


def rates(schedule: str, steps: int, warmup: int = 0, base: float = 0.5, final: float = 0.0) -> list[float]:
    fields = {"schedule": schedule, "base": base, "final": final, "warmup_steps": warmup, "steps": steps}
    return [learning_rate(step, **fields) for step in range(steps)]


def by_torch(scheduler: Callable, steps: int, base: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=base)
    of_torch, rate_S = scheduler(optimizer), []
    for _ in range(steps):
        rate_S.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        of_torch.step()
    return rate_S


@pytest.mark.parametrize("final", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_falling_schedules_are_torchs_from_the_warm_ups_last_step(warmup: int, final: float) -> None:
    steps, base = 40, 0.3
    peak = max(warmup, 1) - 1
    fall = steps - 1 - peak
    cosine = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, fall, final)  # noqa: E731
    linear = lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1, final / base, fall)  # noqa: E731
    for schedule, scheduler in (("cosine", cosine), ("linear", linear)):
        rate_S = rates(schedule, steps, warmup, base, final)
        assert rate_S[peak:] == pytest.approx(by_torch(scheduler, fall + 1, base), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_warm_up_is_linear_bit_for_bit(schedule: str) -> None:
    rate_S = rates(schedule, 30, warmup=7, base=3e-4)
    assert rate_S[:7] == [3e-4 * min(1.0, (step + 1) / 7) for step in range(7)]


def test_cosine_by_hand() -> None:
    # Two steps of warm-up, then 4 of fall: cosines of 45 degrees between.
    half = math.sqrt(0.5)
    expected = [0.5, 1, (1.2 + 0.8 * half) / 2, 0.6, (1.2 - 0.8 * half) / 2, 0.2]
    assert rates("cosine", 6, warmup=2, base=1.0, final=0.2) == pytest.approx(expected, rel=1e-15)
    assert rates("linear", 6, warmup=2, base=1.0, final=0.2) == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2], rel=1e-15)


@pytest.mark.parametrize("warmup", [0, 1, 9])
def test_inverse_sqrt_halves_when_steps_quadruple(warmup: int) -> None:
    rate_S = rates("inverse-sqrt", 200, warmup, base=0.7)
    least = max(warmup, 1)
    assert rate_S[least - 1] == 0.7
    for step in range(least - 1, 200):
        assert rate_S[step] == pytest.approx(0.7 * math.sqrt(least / (step + 1)), rel=1e-15)
    for step in range(least - 1, 49):
        assert rate_S[4 * step + 3] == pytest.approx(rate_S[step] / 2, rel=1e-15)


SIZES = st.tuples(st.integers(2, 200), st.integers(0, 199)).filter(lambda sizes: sizes[1] < sizes[0])


@given(st.sampled_from(SCHEDULES), SIZES, st.floats(1e-6, 1), st.floats(0, 1))
def test_rates_rise_then_fall_and_end_where_they_should(
    schedule: str, sizes: tuple[int, int], base: float, share: float
) -> None:
    (steps, warmup), final = sizes, base * share if schedule in FALLING else 0.0
    rate_S = rates(schedule, steps, warmup, base, final)
    peak = max(warmup, 1) - 1
    assert rate_S[peak] == base == max(rate_S)
    rounding = 1e-15 * base
    assert all(after > before for before, after in pairwise(rate_S[: peak + 1]))
    assert all(after <= before + rounding for before, after in pairwise(rate_S[peak:]))
    assert all(final - rounding <= rate for rate in rate_S[peak:])
    if schedule in FALLING:
        assert rate_S[-1] == (final if steps - 1 > peak else base)


def test_a_step_beyond_the_last_keeps_the_last_rate() -> None:
    fields = {"base": 1.0, "final": 0.1, "warmup_steps": 2, "steps": 10}
    for schedule in FALLING:
        assert learning_rate(25, schedule=schedule, **fields) == 0.1
