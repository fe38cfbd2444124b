"""Solvers of dx/dt = v(x, t) from t = 1 (noise) to t = 0 (data), as generators that ask for velocities.

A solver yields `Ask`, is sent `Answer`, and returns the final x as its StopIteration value, so that the same
code runs in a loop, in an async server and in tests. Shapes: B rows, CHW image.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ddm_ray.core.flow import along_batch
from ddm_ray.errors import SamplingError, TimeError


@dataclass(frozen=True)
class Ask:
    """Wanted: the velocity at (x, t), t in [0, 1]; `new_step` where a step begins (routings may change)."""

    x_BCHW: Tensor
    t: float
    new_step: bool


@dataclass(frozen=True)
class Answer:
    """The velocity, and which rows (bool, None: none) have another set of experts than at the last step."""

    velocity_BCHW: Tensor
    switched_B: Tensor | None = None


Solver = Generator[Ask, Answer, Tensor]


def euler(x_BCHW: Tensor, times: Tensor) -> Solver:
    """First order, one velocity per step."""
    for t, t_next in _steps(times):
        answer = yield Ask(x_BCHW, t, new_step=True)
        x_BCHW = x_BCHW + (t_next - t) * answer.velocity_BCHW
    return x_BCHW


def heun(x_BCHW: Tensor, times: Tensor) -> Solver:
    """Second order, two velocities per step: the mean of those at its start and at its Euler end."""
    for t, t_next in _steps(times):
        start = (yield Ask(x_BCHW, t, new_step=True)).velocity_BCHW
        end = (yield Ask(x_BCHW + (t_next - t) * start, t_next, new_step=False)).velocity_BCHW
        x_BCHW = x_BCHW + (t_next - t) * (start + end) / 2
    return x_BCHW


def midpoint(x_BCHW: Tensor, times: Tensor) -> Solver:
    """Second order, two velocities per step: the one at the middle of its Euler step carries it."""
    for t, t_next in _steps(times):
        half = (t_next - t) / 2
        start = (yield Ask(x_BCHW, t, new_step=True)).velocity_BCHW
        middle = (yield Ask(x_BCHW + half * start, t + half, new_step=False)).velocity_BCHW
        x_BCHW = x_BCHW + 2 * half * middle
    return x_BCHW


def ab2(x_BCHW: Tensor, times: Tensor) -> Solver:
    """Adams-Bashforth, second order on any grid, one velocity per step; the first step is Euler's.

    Rows whose experts switched restart their history (an Euler step), since two fields don't extrapolate.
    """
    previous: Tensor | None = None
    step_before = 1.0
    for t, t_next in _steps(times):
        step = t_next - t
        answer = yield Ask(x_BCHW, t, new_step=True)
        velocity = answer.velocity_BCHW
        # With previous = velocity the formula below is Euler's.
        if previous is None:
            previous = velocity
        elif answer.switched_B is not None:
            previous = torch.where(along_batch(answer.switched_B, velocity), velocity, previous)
        ratio = step / step_before
        x_BCHW = x_BCHW + step * ((1 + ratio / 2) * velocity - ratio / 2 * previous)
        previous, step_before = velocity, step
    return x_BCHW


SOLVERS: dict[str, Callable[[Tensor, Tensor], Solver]] = {
    "euler": euler,
    "heun": heun,
    "midpoint": midpoint,
    "ab2": ab2,
}


def _steps(times: Tensor) -> list[tuple[float, float]]:
    if times.ndim != 1 or len(times) < 2 or not (times.diff() < 0).all():
        raise SamplingError("times must be one-dimensional, two or more, and decrease from 1 to 0")
    if times[0] > 1 or times[-1] < 0:
        raise TimeError(f"times from {float(times[0])} to {float(times[-1])}: use times in [0, 1], 1 is noise")
    return list(pairwise(times.tolist()))
