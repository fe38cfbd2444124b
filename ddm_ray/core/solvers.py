"""Solvers of dx/dt = v(x, t) from t = 1 (noise) to t = 0 (data).

A solver is a pure function from a step to its stages, in plain numbers. `solver_schedule` makes them one table of
numbers, a row a velocity, so that rows of a batch may be at different velocities of different solvers. A new solver is
a function here and a line of SOLVERS. The standard library alone: `config` takes the names from here. Source, where a
solver names none: Hairer, Norsett and Wanner, Solving Ordinary Differential Equations I, chapters II.1 and III.5.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class SolverStep:
    """A step from `t` to `t_next`; `before`: times of the velocities before it, the latest first."""

    t: float
    t_next: float
    before: tuple[float, ...]


@dataclass(frozen=True)
class Stage:
    """One velocity v of a step of width h = t_next - t; v_1, v_2 ... are the velocities before it, the latest first.

    v is evaluated at t + at h and x + h (lean_1 v_1 + lean_2 v_2 ...). Then x becomes
    keep x + h (move_0 v + move_1 v_1 ...) + noise z, z standard normal. `moves` has one `move` for each number of
    velocities before that may be used, the last for all that are more: where experts switch, history restarts.
    """

    at: float = 0.0
    lean: tuple[float, ...] = ()
    moves: tuple[tuple[float, ...], ...] = ((),)
    keep: float = 1.0
    noise: float = 0.0


@dataclass(frozen=True)
class Solver:
    """`order` of convergence; `evaluations`, velocities of a step amid a trajectory; `history`, v_i that stages use.

    `draws`: stages have noise, so that images converge in distribution alone.
    """

    order: int
    evaluations: int
    history: int
    stages: Callable[[SolverStep], Sequence[Stage]]
    draws: bool = False


def runge_kutta(inner: Sequence[Sequence[float]], weights: Sequence[float]) -> list[Stage]:
    """The stages of an explicit Runge-Kutta method by its tableau: weights of earlier stages for each, and of all."""
    stages = [Stage(sum(row), tuple(reversed(row))) for row in inner[:-1]]
    return [*stages, Stage(sum(inner[-1]), tuple(reversed(inner[-1])), (tuple(reversed(weights)),))]


EULER_STAGES = runge_kutta([()], (1,))
HEUN_STAGES = runge_kutta([(), (1,)], (1 / 2, 1 / 2))
MIDPOINT_STAGES = runge_kutta([(), (1 / 2,)], (0, 1))
HEUN_3_STAGES = runge_kutta([(), (1 / 3,), (0, 2 / 3)], (1 / 4, 0, 3 / 4))
RK4_STAGES = runge_kutta([(), (1 / 2,), (0, 1 / 2), (0, 0, 1)], (1 / 6, 1 / 3, 1 / 3, 1 / 6))


def euler(step: SolverStep) -> Sequence[Stage]:
    """Euler's method."""
    return EULER_STAGES


def heun(step: SolverStep) -> Sequence[Stage]:
    """Heun's method (Karras et al. 2022, arXiv 2206.00364, algorithm 1).

    A step is carried by the mean of the velocities at its start and at its Euler end. The last one, to t = 0, is
    Euler's: no network can tell the noise where there is none.
    """
    return HEUN_STAGES if step.t_next else EULER_STAGES


def midpoint(step: SolverStep) -> Sequence[Stage]:
    """The explicit midpoint method: a step is carried by the velocity at the middle of its Euler step."""
    return MIDPOINT_STAGES


def rk4(step: SolverStep) -> Sequence[Stage]:
    """Kutta's method of order 4; the step to t = 0 is Heun's of order 3, which asks for no velocity there.

    One step of order 3 has an error of h^4, as all other steps together.
    """
    return RK4_STAGES if step.t_next else HEUN_3_STAGES


def ab2(step: SolverStep) -> Sequence[Stage]:
    """Two-step Adams-Bashforth for steps of any width; the first step is Euler's, and where history restarts."""
    return (Stage(moves=tuple(adams_bashforth(step, count) for count in range(min(len(step.before), 1) + 1))),)


def ab3(step: SolverStep) -> Sequence[Stage]:
    """Three-step Adams-Bashforth for steps of any width; the first step is the midpoint method's.

    An Euler step would leave an error of h^2. Where history restarts there is one all the same, then one of `ab2`.
    """
    if not step.before:
        return MIDPOINT_STAGES
    return (Stage(moves=tuple(adams_bashforth(step, count) for count in range(min(len(step.before), 2) + 1))),)


def adams_bashforth(step: SolverStep, count: int) -> tuple[float, ...]:
    """Weights over [t, t_next] of the polynomial through the velocity at t and `count` (up to 2) before it."""
    if not count:
        return (1.0,)
    h = step.t_next - step.t
    if count == 1:
        ratio = h / (step.t - step.before[0])
        return 1 + ratio / 2, -ratio / 2
    # Integrals over s in [0, 1] of Lagrange's polynomials of the nodes 0, -a and -b, in units of h.
    a, b = ((step.t - before) / h for before in step.before[:2])
    return 1 + (1 / 3 + (a + b) / 2) / (a * b), -(1 / 3 + b / 2) / (a * (b - a)), (1 / 3 + a / 2) / (b * (b - a))


def ancestral(step: SolverStep) -> Sequence[Stage]:
    """Ancestral sampling of DDPM on the linear path, a stochastic Euler method (Ho et al. 2020, arXiv 2006.11239).

    From data x - t v and noise x + (1 - t) v, as Song et al. (2021, arXiv 2010.02502, equation 12) at eta = 1: a part
    `down` of the noise stays, as much is drawn as then makes a standard deviation of t_next.
    """
    t, t_next = step.t, step.t_next
    down = t_next**2 * (1 - t) / (t * (1 - t_next))
    move = (down * (1 - t) - (1 - t_next) * t) / (t_next - t)
    return (Stage(moves=((move,),), keep=1 - t_next + down, noise=math.sqrt(t_next**2 - down**2)),)


SOLVERS = {
    "euler": Solver(1, 1, 0, euler),
    "heun": Solver(2, 2, 1, heun),
    "midpoint": Solver(2, 2, 1, midpoint),
    "ab2": Solver(2, 1, 1, ab2),
    "ab3": Solver(3, 1, 2, ab3),
    "rk4": Solver(4, 4, 3, rk4),
    "ancestral": Solver(1, 1, 0, ancestral, draws=True),
}

if TYPE_CHECKING:
    SolverName = str  # mypy takes only literals that are written out
else:
    SolverName = Literal[*SOLVERS]
