import math

import pytest
import torch

from ddm_ray.core.solvers import SOLVERS, Answer, uniform_times
from ddm_ray.errors import SamplingError
from tests.core import oracles


@pytest.mark.parametrize(("solver", "order"), oracles.ORDERS.items())
@pytest.mark.parametrize("error", [oracles.map_error, oracles.grid_error])
def test_order_on_the_closed_form_map_of_one_gaussian(solver: str, order: int, error) -> None:
    assert abs(math.log2(error(solver, 64) / error(solver, 128)) - order) < 0.25


@pytest.mark.parametrize(("solver", "most"), [("euler", 0.05), ("heun", 0.002), ("ab2", 0.004)])
def test_the_map_itself(solver: str, most: float) -> None:
    assert oracles.map_error(solver, 50) < most


@pytest.mark.parametrize(("solver", "per_step"), [("euler", 1), ("heun", 2), ("ab2", 1)])
def test_velocities_asked_for(solver: str, per_step: int) -> None:
    asking = SOLVERS[solver](torch.zeros(2, 1, 1, 1), uniform_times(4))
    asks = [next(asking)]
    for _ in range(4 * per_step - 1):
        asks.append(asking.send(Answer(torch.ones(2, 1, 1, 1))))
    with pytest.raises(StopIteration) as end:
        asking.send(Answer(torch.ones(2, 1, 1, 1)))
    assert [ask.t for ask in asks if ask.new_step] == [1.0, 0.75, 0.5, 0.25]
    torch.testing.assert_close(end.value.value, torch.full((2, 1, 1, 1), -1.0))


def test_only_rows_that_switched_restart_their_history() -> None:
    asking = SOLVERS["ab2"](torch.zeros(2, 1), uniform_times(2))
    next(asking)
    asking.send(Answer(torch.full((2, 1), 2.0)))
    with pytest.raises(StopIteration) as end:
        asking.send(Answer(torch.full((2, 1), 6.0), torch.tensor([True, False])))
    # Euler: -(2 + 6) / 2; Adams-Bashforth: -(2 + 1.5 * 6 - .5 * 2) / 2.
    torch.testing.assert_close(end.value.value, torch.tensor([[-4.0], [-5.0]]))


@pytest.mark.parametrize("solver", ["euler", "heun", "ab2"])
def test_a_sparse_routing_is_held_within_a_step_and_restarts_at_a_switch(solver: str) -> None:
    oracles.check_piecewise(solver)


def test_uniform_times_run_from_noise_to_data() -> None:
    torch.testing.assert_close(uniform_times(4), torch.tensor([1, 0.75, 0.5, 0.25, 0], dtype=torch.float64))
    with pytest.raises(SamplingError, match="steps is 0"):
        uniform_times(0)


@pytest.mark.parametrize("times", [[1.0], [0.0, 1.0], [1.0, 1.0, 0.0], [[1.0, 0.0]]])
def test_times_that_do_not_decrease_are_refused(times) -> None:
    with pytest.raises(SamplingError, match="decrease"):
        next(SOLVERS["euler"](torch.zeros(1, 1), torch.tensor(times)))
