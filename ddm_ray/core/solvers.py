"""Solvers of dx/dt = v(x, t) from t = 1 (noise) to t = 0 (data), as tables of what each velocity is taken for.

A table becomes, on a grid of times, a schedule: all that a trajectory needs to know of its solver, as one row of
numbers a velocity. So rows of a batch may be at different velocities of different solvers. Sources, where a solver
names none: Hairer, Norsett and Wanner, Solving Ordinary Differential Equations I, chapters II.1 and III.5. Shapes:
N velocities of a trajectory, S steps, B rows, CHW image.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.flow import append_dims
from ddm_ray.core.names import SolverName
from ddm_ray.errors import SamplingError, TimeError


@dataclass(frozen=True)
class Stage:
    """One velocity v of a step of width h, `last` being the velocity before it.

    v is asked for at t + at h and x + at h last. Then x becomes x + h ((this + r e) v + (last - r e) last), where e is
    `extrapolated` and r the ratio of h to the step before, 0 where a history begins.
    """

    at: float = 0.0
    this: float = 0.0
    last: float = 0.0
    extrapolated: float = 0.0


@dataclass(frozen=True)
class Solver:
    """The stages of a step, and those of a step to t = 0 where they differ."""

    stages: tuple[Stage, ...]
    to_data: tuple[Stage, ...] | None = None


EULER = Solver((Stage(this=1),))
"""Euler's method: first order, one velocity a step, S in S steps."""

HEUN = Solver((Stage(), Stage(at=1, this=1 / 2, last=1 / 2)), to_data=EULER.stages)
"""Heun's method (Karras et al. 2022, arXiv 2206.00364, algorithm 1): second order, 2 S - 1 velocities in S steps.

A step is carried by the mean of the velocities at its start and at its Euler end. The last one, to t = 0, is Euler's:
no network can tell the noise where there is none.
"""

MIDPOINT = Solver((Stage(), Stage(at=1 / 2, this=1)))
"""The explicit midpoint method: second order, 2 S velocities in S steps.

A step is carried by the velocity at the middle of its Euler step.
"""

AB2 = Solver((Stage(this=1, extrapolated=1 / 2),))
"""Two-step Adams-Bashforth for steps of any width: second order, S velocities in S steps; the first is Euler's.

Rows whose experts switched restart their history (an Euler step), since two fields don't extrapolate.
"""

SOLVERS: dict[SolverName, Solver] = {"euler": EULER, "heun": HEUN, "midpoint": MIDPOINT, "ab2": AB2}


VELOCITY = np.dtype(
    [(name, np.float64) for name in ("t", "lean", "this", "last", "fresh", "stale", "until")]
    + [("step", np.int64), ("starts", np.bool_), ("ends", np.bool_)]
)
"""One velocity of a trajectory: `t` that it is asked for at, and how far along the velocity before it from x (`lean`).

x then goes by `this` times it and by `last` times the one before; by `fresh` and `stale` where history restarts.
`step`: the number of its step, from 0, which ends at t = `until`; whether it is the step's first (`starts`), its last
(`ends`).
"""


def schedule(solver: Solver, times: Tensor) -> np.ndarray:
    """The velocities that a solver asks for on a grid of S + 1 times: (N,) of VELOCITY.

    SamplingError for times that don't decrease, TimeError for those outside [0, 1].
    """
    rows, step_before = [], 0.0
    for step, (t, t_next) in enumerate(_steps(times)):
        h = t_next - t
        ratio = h / step_before if step_before else 0.0
        stages = solver.to_data if t_next == 0 and solver.to_data else solver.stages
        for stage in stages:
            more = ratio * stage.extrapolated
            asked = (1 - stage.at) * t + stage.at * t_next, stage.at * h
            carried = h * (stage.this + more), h * (stage.last - more), h * stage.this, h * stage.last
            rows.append((*asked, *carried, t_next, step, stage is stages[0], stage is stages[-1]))
        step_before = h
    return np.array(rows, VELOCITY)


def moved(x_BCHW: Tensor, velocity_BCHW: Tensor, by: float | Tensor) -> Tensor:
    """x + by * velocity, `by` one number or one a row (B,)."""
    if isinstance(by, Tensor):
        return torch.addcmul(x_BCHW, append_dims(by, x_BCHW), velocity_BCHW)
    return torch.add(x_BCHW, velocity_BCHW, alpha=by) if by else x_BCHW


def _steps(times: Tensor) -> list[tuple[float, float]]:
    if times.ndim != 1 or len(times) < 2 or not (times.diff() < 0).all():
        raise SamplingError("times must be one-dimensional, two or more, and decrease from 1 to 0")
    if times[0] > 1 or times[-1] < 0:
        raise TimeError(f"times from {float(times[0])} to {float(times[-1])}: use times in [0, 1], 1 is noise")
    return list(pairwise(times.tolist()))
