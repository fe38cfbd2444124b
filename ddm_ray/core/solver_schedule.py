"""The velocities of a trajectory, of any solver, as rows of one table; and moves of images by them.

Shapes: N velocities of a trajectory, S steps, B rows, CHW image.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.flow import append_dims
from ddm_ray.core.solvers import SOLVERS, Solver, SolverStep
from ddm_ray.errors import SamplingError

HISTORY = max(1, *(solver.history for solver in SOLVERS.values()))
"""Velocities before the present one that a row of the table has room for."""

VELOCITY = np.dtype(
    [(name, np.float64) for name in ("t", "keep", "noise", "until")]
    + [("lean", np.float64, (HISTORY,)), ("moves", np.float64, (HISTORY + 1, HISTORY + 1))]
    + [("step", np.int64), ("starts", np.bool_), ("ends", np.bool_)]
)
"""One velocity v of a trajectory. It is evaluated at `t`, and at x moved by `lean` times the velocities before it.

x then becomes `keep` x + moves[n] times v and the velocities before it + `noise` z; n of these may be used, since all
others are from before history restarted. Velocities before are in order, the latest first. `step`: the number of its
step, from 0, which ends at t = `until`; whether it is the step's first (`starts`), its last (`ends`).
"""


def schedule(solver: Solver, times: Tensor) -> np.ndarray:
    """The velocities that a solver asks for on a grid of S + 1 times: (N,) of VELOCITY.

    SamplingError for times that don't decrease, or are outside [0, 1].
    """
    rows = []
    before: tuple[float, ...] = ()
    for number, (t, t_next) in enumerate(_steps(times)):
        h = t_next - t
        stages = solver.stages(SolverStep(t, t_next, before))
        for index, stage in enumerate(stages):
            row = np.zeros((), VELOCITY)
            row["t"], row["until"] = (1 - stage.at) * t + stage.at * t_next, t_next
            row["keep"], row["noise"] = stage.keep, stage.noise
            row["lean"][: len(stage.lean)] = [h * weight for weight in stage.lean]
            for count in range(HISTORY + 1):
                move = stage.moves[min(count, len(stage.moves) - 1)]
                row["moves"][count, : len(move)] = [h * weight for weight in move]
            row["step"], row["starts"], row["ends"] = number, index == 0, index == len(stages) - 1
            rows.append(row)
            before = (float(row["t"]), *before[: HISTORY - 1])
    return np.array(rows, VELOCITY)


def moved(x_BCHW: Tensor, velocities: Sequence[Tensor], by: Sequence[float | Tensor]) -> Tensor:
    """x + the sum of by * velocity, each `by` one number or one a row (B,)."""
    for velocity_BCHW, width in zip(velocities, by, strict=True):
        if isinstance(width, Tensor):
            x_BCHW = torch.addcmul(x_BCHW, append_dims(width, x_BCHW), velocity_BCHW)
        elif width:
            x_BCHW = torch.add(x_BCHW, velocity_BCHW, alpha=width)
    return x_BCHW


def _steps(times: Tensor) -> list[tuple[float, float]]:
    if times.ndim != 1 or len(times) < 2 or not (times.diff() < 0).all():
        raise SamplingError("times must be one-dimensional, two or more, and decrease from 1 to 0")
    if times[0] > 1 or times[-1] < 0:
        raise SamplingError(f"times from {float(times[0])} to {float(times[-1])}: use times in [0, 1], 1 is noise")
    return list(pairwise(times.tolist()))
