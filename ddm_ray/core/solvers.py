"""Solvers of dx/dt = v(x, t) from t = 1 (noise) to t = 0 (data), as generators that ask for velocities.

A solver yields `Ask`, is sent `Answer`, and returns the final x as its StopIteration value, so that the same code runs
in a loop, in an async server and in tests. Sources, where a solver names none: Hairer, Norsett and Wanner, Solving
Ordinary Differential Equations I, chapters II.1 and III.5. Shapes: B rows, CHW image.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ddm_ray.core.flow import append_dims
from ddm_ray.core.names import SolverName
from ddm_ray.errors import SamplingError, TimeError


@dataclass(frozen=True)
class Ask:
    """A request for the velocity at (x, t), t in [0, 1]; `new_step` where a step begins (routings may change)."""

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
    """Euler's method: first order, one velocity per step, S in S steps."""
    for t, t_next in _steps(times):
        answer = yield Ask(x_BCHW, t, new_step=True)
        x_BCHW = x_BCHW + (t_next - t) * answer.velocity_BCHW
    return x_BCHW


def heun(x_BCHW: Tensor, times: Tensor) -> Solver:
    """Heun's method (Karras et al. 2022, arXiv 2206.00364, algorithm 1): second order, 2 S - 1 velocities in S steps.

    A step is carried by the mean of the velocities at its start and at its Euler end. The last one, to t = 0, is
    Euler's: no network can tell the noise where there is none.
    """
    for t, t_next in _steps(times):
        start = end = (yield Ask(x_BCHW, t, new_step=True)).velocity_BCHW
        if t_next > 0:
            end = (yield Ask(x_BCHW + (t_next - t) * start, t_next, new_step=False)).velocity_BCHW
        x_BCHW = x_BCHW + (t_next - t) * (start + end) / 2
    return x_BCHW


def midpoint(x_BCHW: Tensor, times: Tensor) -> Solver:
    """The explicit midpoint method: second order, 2 S velocities in S steps.

    A step is carried by the velocity at the middle of its Euler step.
    """
    for t, t_next in _steps(times):
        half = (t_next - t) / 2
        start = (yield Ask(x_BCHW, t, new_step=True)).velocity_BCHW
        middle = (yield Ask(x_BCHW + half * start, t + half, new_step=False)).velocity_BCHW
        x_BCHW = x_BCHW + 2 * half * middle
    return x_BCHW


def ab2(x_BCHW: Tensor, times: Tensor) -> Solver:
    """Two-step Adams-Bashforth for steps of any width: second order, S velocities in S steps; the first is Euler's.

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
            previous = torch.where(append_dims(answer.switched_B, velocity), velocity, previous)
        ratio = step / step_before
        x_BCHW = x_BCHW + step * ((1 + ratio / 2) * velocity - ratio / 2 * previous)
        previous, step_before = velocity, step
    return x_BCHW


SOLVERS: dict[SolverName, Callable[[Tensor, Tensor], Solver]] = {
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
