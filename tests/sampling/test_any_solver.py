"""The contract of SOLVERS with the state of trajectories; `core/test_solvers` has that of their numbers."""

import numpy as np
import pytest
import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.core.solvers import SOLVERS
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.serialization import pack, unpack
from ddm_ray.sampling.state import Trajectories
from ddm_ray.sampling.trajectory import advance, next_calls, start, turned
from tests.core import closed_forms, oracles
from tests.sampling.test_joined_rows import SYSTEM, one_velocity


def request(solver: str, first_seed: int = 0, steps: int = 5) -> SampleRequest:
    """Three images with guidance that sets in amid the trajectory, and experts that switch."""
    chosen = SamplingSettings(
        strategy="sample-1", solver=solver, steps=steps, guidance_scale=2.0, guidance_interval=(0.0, 0.5)
    )
    return SampleRequest((first_seed, first_seed + 1, 2**64 - 1 - first_seed), torch.arange(3), chosen)


def alone(solver: str, first_seed: int = 0, steps: int = 5) -> torch.Tensor:
    asked = request(solver, first_seed, steps)
    return driver.sample(asked, SYSTEM.info(), SYSTEM.experts, SYSTEM.router).images_BCHW


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_state_that_is_packed_after_every_velocity_goes_on(solver: str) -> None:
    state = start(request(solver), SYSTEM.info())
    while not state.done_B.any():
        state = unpack(pack(one_velocity(state)), SYSTEM.info())
        state = state if state.done_B.any() else turned(state)
    assert torch.equal(state.result().images_BCHW, alone(solver))


@pytest.mark.parametrize("solver", SOLVERS)
def test_rows_among_those_of_every_other_solver_end_as_alone(solver: str) -> None:
    """They join after two velocities, with longer and shorter histories, and stay when others leave."""
    others = [start(request(name, 10 * number, 7), SYSTEM.info()) for number, name in enumerate(SOLVERS, 1)]
    state = turned(Trajectories.joined([one_velocity(one_velocity(start(request(solver), SYSTEM.info()))), *others]))
    seeds, images = request(solver).seeds, None
    while images is None:
        state = one_velocity(state)
        if state.done_B.any():
            mine_B = np.isin(state.seed_B, np.array(seeds, np.uint64))
            if (state.done_B & mine_B).any():
                images = state.rows(mine_B).result().images_BCHW
            else:
                state = turned(state.rows(~state.done_B))
    torch.testing.assert_close(images, alone(solver), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_preview_of_data_without_spread_is_the_data(solver: str) -> None:
    """After each step, whatever noise it drew."""
    one = closed_forms.GaussianMixture(
        oracles.ONE.prior_CK, oracles.ONE.mean_CKD[0], torch.full((1,), 1e-9, dtype=torch.float64)
    )
    chosen = SamplingSettings(strategy="once", solver=solver, steps=4)
    state = start(SampleRequest((1, 2), torch.zeros(2, dtype=torch.int64), chosen), one.info())
    while not state.done_B.any():
        ends = bool(state.planned()["ends"][0])
        state = advance(state, driver.answers(next_calls(state), one.experts, None))
        if ends:
            right = one.mean_CKD[0, 0].expand(2, 1, 1, -1)
            torch.testing.assert_close(state.foreseen().images_BCHW, right, rtol=0, atol=1e-7)
