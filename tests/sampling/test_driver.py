import pytest
import torch

from ddm_ray.errors import SamplingError
from ddm_ray.sampling.driver import run, sample
from ddm_ray.sampling.trajectory import SampleRequest, trajectories
from tests.core import closed_forms, oracles

WANTED = SampleRequest(tuple(range(40)), torch.ones(40, dtype=torch.int64), steps=2, strategy="once")
FULL = SampleRequest((1, 2), torch.tensor([0, 1]), steps=2, strategy="full")


def test_a_router_that_is_needed_but_absent_is_named() -> None:
    system = closed_forms.three_gaussians()
    with pytest.raises(SamplingError, match="the router is needed"):
        run(trajectories(FULL, system.info()), system.experts)
    assert run(trajectories(WANTED, system.info()), system.experts).images_BCHW.shape == (40, 1, 1, 2)


def test_an_expert_that_is_called_but_absent_is_named() -> None:
    system = closed_forms.three_gaussians()
    with pytest.raises(SamplingError, match="expert 1 is needed"):
        run(trajectories(FULL, system.info()), [system.experts[0], None, system.experts[2]], system.router)


@pytest.mark.parametrize("strategy", ["once", "full", "top-2"])
def test_absent_experts_are_left_out(strategy: str) -> None:
    system = closed_forms.three_gaussians()
    wanted = SampleRequest(WANTED.seeds, WANTED.label_B, 2, 1.0, strategy)
    sampled = sample(wanted, system.info(), [None, *system.experts[1:]], system.router)
    assert set(sampled.experts_SB.unique().tolist()) == {1, 2}
    assert sampled.images_BCHW.isfinite().all()


def test_the_field_without_an_expert_is_that_of_the_rest_of_the_data() -> None:
    oracles.check_missing_expert()


def test_no_expert_at_all_is_refused() -> None:
    system = closed_forms.three_gaussians()
    with pytest.raises(SamplingError, match="no expert is alive"):
        run(trajectories(WANTED, system.info().with_alive(torch.zeros(3, dtype=torch.bool))), system.experts)
    with pytest.raises(SamplingError, match="2 experts given for a mixture of 3"):
        sample(WANTED, system.info(), system.experts[:2])


def test_models_run_without_gradients() -> None:
    system, seen = closed_forms.three_gaussians(), []

    def watching(x_BCHW, t_B, label_B):
        seen.append(torch.is_inference_mode_enabled())
        return torch.zeros_like(x_BCHW)

    run(trajectories(WANTED, system.info()), [watching] * 3)
    assert seen
    assert all(seen)


def test_bfloat16_answers_keep_the_state_in_its_own_precision() -> None:
    system = closed_forms.three_gaussians()
    experts = [lambda x, t, label: torch.zeros_like(x, dtype=torch.bfloat16)] * 3
    assert run(trajectories(WANTED, system.info()), experts).images_BCHW.dtype == torch.float64
