"""The contract of SOLVERS: every entry does as it declares.

Orders are on closed forms: single Gaussians, whose map is known, and a mixture, whose map torchdiffeq integrates.
"""

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from torchdiffeq import odeint

from ddm_ray.core.solver_schedule import schedule
from ddm_ray.core.solvers import SOLVERS, SolverStep
from ddm_ray.core.times import time_grid
from ddm_ray.errors import SamplingError
from tests.core import closed_forms, oracles
from tests.core.closed_forms import ONE
from tests.core.paths_closed_form import PathMixture

pytestmark = pytest.mark.contract

GRIDS = ("uniform", "cosine", "shifted-3")
MIXTURE = PathMixture.random(3, 3, 2, (0.3, 0.8))
SINGLE = [PathMixture.random(seed, 1, 4, (0.3, 1.5)) for seed in range(4)]
START_BD = torch.randn(32, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
NOISE_BD = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def solve(solver: str, system: PathMixture, x_BD: Tensor, times: Tensor) -> Tensor:
    def field(x_BD: Tensor, t: float) -> Tensor:
        return system.linear_velocity(x_BD, torch.full((len(x_BD),), t, dtype=torch.float64))

    return oracles.solve(solver, x_BD, times, field)


@cache
def adaptive(start: float, end: float) -> Tensor:
    """The mixture's map from t = `start` to `end`."""

    def field(t: Tensor, x_BD: Tensor) -> Tensor:
        return MIXTURE.linear_velocity(x_BD, t.expand(len(x_BD)))

    times = torch.tensor([start, end], dtype=torch.float64)
    return odeint(field, START_BD, times, rtol=1e-12, atol=1e-12, method="dopri5")[-1]


def mixture_error(solver: str, grid: str, steps: int, start: float = 1.0, end: float = 0.0) -> float:
    times = end + (start - end) * time_grid(grid, steps)
    return float((solve(solver, MIXTURE, START_BD, times) - adaptive(start, end)).square().mean().sqrt())


def single_error(solver: str, grid: str, steps: int) -> float:
    """Root mean square over Gaussians of several widths: the error of any one may cross 0."""
    squares = [
        (solve(solver, one, NOISE_BD, time_grid(grid, steps)) - one.mean_KD[0] - one.std_K[0] * NOISE_BD).square()
        for one in SINGLE
    ]
    return float(torch.stack(squares).mean().sqrt())


def order(error, solver: str, grid: str, *fields, steps=(32, 64, 128, 256)) -> float:
    """Slope of log error over log steps, least squares."""
    errors = [error(solver, grid, num, *fields) for num in steps]
    return -float(np.polyfit(np.log(steps), np.log(errors), 1)[0])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("solver", oracles.EXACT)
def test_order_on_a_mixture(solver: str, grid: str) -> None:
    assert abs(order(mixture_error, solver, grid, steps=(64, 128, 256, 512)) - SOLVERS[solver].order) < 0.12


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("solver", oracles.EXACT)
def test_order_on_single_gaussians_where_midpoint_gains_one(solver: str, grid: str) -> None:
    right = SOLVERS[solver].order + (solver == "midpoint")
    assert abs(order(single_error, solver, grid) - right) < 0.12


@pytest.mark.parametrize("solver", ["heun", "midpoint"])
def test_order_of_strategies_that_hold_their_experts_within_a_step(solver: str) -> None:
    system = closed_forms.three_gaussians()
    right = oracles.sample_system(system, 8, 1, strategy="full", solver="midpoint", steps=320).images_BCHW
    for strategy in ("top-3", "threshold-0.000001"):
        coarse, fine = (
            (oracles.sample_system(system, 8, 1, strategy=strategy, solver=solver, steps=steps).images_BCHW - right)
            .flatten(1)
            .norm(dim=1)
            .mean()
            for steps in (20, 80)
        )
        assert abs(math.log(coarse / fine, 4) - 2) < 0.25, strategy


@pytest.mark.parametrize(("solver", "most"), [("euler", 0.05), ("heun", 0.002), ("midpoint", 1e-4), ("ab2", 0.004)])
def test_the_map_itself(solver: str, most: float) -> None:
    assert oracles.map_error(solver, 50) < most


@pytest.mark.parametrize("solver", SOLVERS)
def test_data_without_spread_are_met_exactly(solver: str) -> None:
    """At t = 0 itself no network knows the noise: a velocity asked for there leaves half a step's noise."""
    point = closed_forms.GaussianMixture(ONE.prior_CK, ONE.mean_CKD[0], torch.full((1,), 1e-6, dtype=torch.float64))
    assert oracles.map_error(solver, 25, one=point) < 1e-5


@pytest.mark.parametrize("solver", SOLVERS)
def test_velocities_asked_for(solver: str) -> None:
    planned = schedule(SOLVERS[solver], time_grid("uniform", 4))
    assert planned["t"][planned["starts"]].tolist() == [1.0, 0.75, 0.5, 0.25]
    assert planned["until"][planned["ends"]].tolist() == [0.75, 0.5, 0.25, 0.0]
    assert planned["step"][planned["ends"]].tolist() == [0, 1, 2, 3]
    assert ((planned["t"] > 0) & (planned["t"] <= 1)).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_step_is_as_its_solver_declares(solver: str) -> None:
    """So many velocities of it and before it, none of them asked for at t = 0, and no more weights than both."""
    declared = SOLVERS[solver]
    planned = schedule(declared, time_grid("shifted-3", 7))
    assert set(np.bincount(planned["step"])[1:-1]) == {declared.evaluations}
    assert ((planned["t"] > 0) & (planned["t"] <= 1)).all() and (planned["keep"] > 0).all()
    for name in ("lean", "moves"):
        used = np.flatnonzero((planned[name] != 0).reshape(-1, planned[name].shape[-1]).any(axis=0))
        assert used.max(initial=0) <= declared.history - (name == "lean") or not used.size, name
    assert bool((planned["noise"] != 0).any()) == declared.draws
    assert planned["noise"][-1] == 0
    step = SolverStep(0.5, 0.25, (0.75, 1.0))
    assert [*declared.stages(step)] == [*declared.stages(step)]


@pytest.mark.parametrize("solver", oracles.EXACT)
@pytest.mark.parametrize("restarts", [(), (1,), (2, 3)])
def test_a_velocity_that_stays_the_same_is_integrated_exactly(solver: str, restarts: tuple[int, ...]) -> None:
    times, ones = time_grid("shifted-3", 5), torch.ones(2, 1, dtype=torch.float64)
    ends = oracles.solve(solver, torch.zeros_like(ones), times, lambda x, t: ones, restarts)
    torch.testing.assert_close(ends, -ones, rtol=0, atol=1e-14)


@pytest.mark.parametrize("solver", [name for name in oracles.EXACT if name != "euler"])
def test_a_velocity_that_is_linear_in_time_is_integrated_exactly(solver: str) -> None:
    """Up to its last step, which may be Euler's, and where history starts."""
    times, zero = time_grid("uniform", 6), torch.zeros(1, dtype=torch.float64)
    ends = [oracles.solve(solver, zero, times[:steps], lambda x, t: torch.full_like(x, t)) for steps in (3, 6)]
    torch.testing.assert_close(ends[1] - ends[0], (times[5] ** 2 - times[2] ** 2)[None] / 2, rtol=0, atol=1e-14)


@pytest.mark.parametrize("solver", [name for name, solver in SOLVERS.items() if solver.draws])
def test_images_of_solvers_that_draw_converge_in_variance(solver: str) -> None:
    coarse, fine = (abs(oracles.variance_of_samples(solver, n) - float(ONE.std_CK[0, 0]) ** 2) for n in (128, 256))
    assert abs(math.log2(coarse / fine) - SOLVERS[solver].order) < 0.1


def test_a_history_that_restarts_is_an_euler_step() -> None:
    field = lambda x, t: torch.full_like(x, 2.0 if t == 1 else 6.0)  # noqa: E731
    ends = [oracles.solve("ab2", torch.zeros(1), time_grid("uniform", 2), field, steps) for steps in ((1,), ())]
    # Euler: -(2 + 6) / 2; Adams-Bashforth: -(2 + 1.5 * 6 - .5 * 2) / 2.
    assert [float(end) for end in ends] == [-4.0, -5.0]


@pytest.mark.parametrize("solver", oracles.EXACT)
def test_a_sparse_routing_is_held_within_a_step_and_restarts_at_a_switch(solver: str) -> None:
    oracles.check_piecewise(solver)


@pytest.mark.parametrize("times", [[1.0], [0.0, 1.0], [1.0, 1.0, 0.0], [[1.0, 0.0]]])
def test_times_that_do_not_decrease_from_one_to_zero_are_refused(times) -> None:
    with pytest.raises(SamplingError, match="decrease"):
        schedule(SOLVERS["euler"], torch.tensor(times))


@pytest.mark.parametrize("times", [[1.5, 0.0], [1.0, -0.1]])
def test_times_outside_the_path_are_refused(times: list[float]) -> None:
    with pytest.raises(SamplingError, match=r"use times in \[0, 1\]"):
        schedule(SOLVERS["euler"], torch.tensor(times))
