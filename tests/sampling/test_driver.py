"""The synchronous driver: one velocity, whole trajectories, and what it says when something isn't there."""

import math
from dataclasses import replace

import pytest
import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.errors import ExpertCountError, NotFiniteError, SamplingError
from ddm_ray.sampling.driver import drawn_experts, mixture_velocity, run, sample
from ddm_ray.sampling.request import SampleRequest
from ddm_ray.sampling.trajectory import start
from tests.core import closed_forms, missing_expert_oracles

WANTED = SampleRequest(tuple(range(40)), torch.ones(40, dtype=torch.int64), SamplingSettings(steps=2))
FULL = SampleRequest((1, 2), torch.tensor([0, 1]), SamplingSettings(steps=2, strategy="full"))


def one_line(error: pytest.ExceptionInfo) -> bool:
    return "\n" not in str(error.value)


def test_a_router_that_is_needed_but_absent_is_named() -> None:
    system = closed_forms.three_gaussians()
    with pytest.raises(SamplingError, match="the router is needed") as error:
        run(start(FULL, system.info()), system.experts)
    assert one_line(error)
    assert run(start(WANTED, system.info()), system.experts).x_BCHW.shape == (40, 1, 1, 2)


def test_an_expert_that_is_called_but_absent_is_named() -> None:
    system = closed_forms.three_gaussians()
    with pytest.raises(SamplingError, match="expert 1 is needed"):
        run(start(FULL, system.info()), [system.experts[0], None, system.experts[2]], system.router)


@pytest.mark.parametrize(
    "strategy",
    ["once", "full", "top-1", "top-2", "top-3", "sticky", "threshold-0.1", "nucleus-0.9", "sample-1", "sample-3"],
)
def test_absent_experts_are_left_out(strategy: str) -> None:
    system = closed_forms.three_gaussians()
    sampled = sample(WANTED.changed(strategy=strategy), system.info(), [None, *system.experts[1:]], system.router)
    assert (sampled.routing_SBK[:, :, 0] == 0).all()
    torch.testing.assert_close(sampled.routing_SBK.sum(dim=2), torch.ones(2, 40, dtype=torch.float64))
    assert sampled.images_BCHW.isfinite().all()


def test_the_oracle_of_an_absent_expert_is_refused() -> None:
    system = closed_forms.three_gaussians()
    sample_request = replace(FULL.changed(strategy="oracle"), cluster_B=torch.tensor([0, 2]))
    with pytest.raises(SamplingError, match="wanted cluster isn't there"):
        sample(sample_request, system.info(), [*system.experts[:2], None])
    assert sample(sample_request, system.info(), [system.experts[0], None, system.experts[2]]).num_expert_rows == 4


def test_the_field_without_an_expert_is_that_of_the_rest_of_the_data() -> None:
    missing_expert_oracles.check_missing_expert()


def test_no_expert_at_all_is_refused() -> None:
    system = closed_forms.three_gaussians()
    with pytest.raises(SamplingError, match="no expert is available"):
        run(start(WANTED, system.info().with_available(torch.zeros(3, dtype=torch.bool))), system.experts)


def test_another_number_of_experts_is_refused() -> None:
    system = closed_forms.three_gaussians()
    for experts in (system.experts[:2], [*system.experts, None], []):
        with pytest.raises(ExpertCountError, match=f"{len(experts)} experts given for a mixture of 3") as error:
            sample(WANTED, system.info(), experts)
        assert one_line(error)


@pytest.mark.parametrize("strategy", ["full", "top-1", "sample-2"])
def test_a_router_of_another_number_of_experts_is_refused(strategy: str) -> None:
    system = closed_forms.three_gaussians()
    router_of_four = lambda x, t, label: torch.zeros(len(x), 4)  # noqa: E731
    with pytest.raises(ExpertCountError, match="router speaks of 4 experts, the mixture has 3") as error:
        sample(FULL.changed(strategy=strategy), system.info(), system.experts, router_of_four)
    assert one_line(error)


@pytest.mark.parametrize("t", [-0.1, 1.2, math.nan, math.inf, -1e-9])
@pytest.mark.parametrize("strategy", ["full", "once"])
def test_a_time_outside_zero_to_one_is_refused(t: float, strategy: str) -> None:
    system = closed_forms.three_gaussians()
    x_BCHW = torch.zeros(2, 1, 1, 2, dtype=torch.float64)
    parts = (system.info(), system.experts, system.router)
    with pytest.raises(SamplingError, match=r"t is .*: times are in \[0, 1\]") as error:
        mixture_velocity(x_BCHW, t, torch.tensor([0, 1]), *parts, settings=SamplingSettings(strategy=strategy))
    assert one_line(error)


def test_velocity_at_both_ends() -> None:
    system, x_BCHW = closed_forms.three_gaussians(), torch.ones(2, 1, 1, 2, dtype=torch.float64)
    label_B = torch.tensor([0, 1])
    at_noise = mixture_velocity(x_BCHW, 1.0, label_B, system.info(), system.experts, system.router)
    means_BD = torch.einsum("bk,bkd->bd", system.prior_CK[label_B], system.mean_CKD[label_B])
    torch.testing.assert_close(at_noise.flatten(1), x_BCHW.flatten(1) - means_BD, rtol=0, atol=1e-12)
    at_data = mixture_velocity(x_BCHW, 0.0, label_B, system.info(), system.experts, system.router)
    torch.testing.assert_close(at_data, -x_BCHW, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("strategy", ["full", "once", "top-1"])
def test_a_velocity_that_is_not_finite_names_the_expert_and_t(bad: float, strategy: str) -> None:
    system = closed_forms.three_gaussians()

    def broken(x_BCHW, t_B, label_B):
        return torch.where(t_B < 0.9, bad, 0.0).view(-1, 1, 1, 1).expand_as(x_BCHW)

    experts = [broken if k == 1 else expert for k, expert in enumerate(system.experts)]
    router = (
        (lambda x, t, label: torch.tensor([0.0, 1.0, 0.0]).expand(len(x), 3)) if strategy == "top-1" else system.router
    )
    with pytest.raises(NotFiniteError, match=r"^expert 1 .* t = 0.6667$") as error:
        sample(WANTED.changed(steps=3, strategy=strategy), system.info(), experts, router)
    assert one_line(error)


def test_a_router_without_a_posterior_is_told_from_an_expert() -> None:
    system = closed_forms.three_gaussians()
    with pytest.raises(NotFiniteError, match="the router gave NaN at t = 1") as error:
        sample(FULL, system.info(), system.experts, lambda x, t, label: torch.full((len(x), 3), math.nan))
    assert one_line(error)
    with pytest.raises(NotFiniteError, match="the router gave logits without a posterior"):
        sample(FULL, system.info(), system.experts, lambda x, t, label: torch.full((len(x), 3), math.inf))


def test_models_run_without_gradients() -> None:
    system, seen = closed_forms.three_gaussians(), []

    def watching(x_BCHW, t_B, label_B):
        seen.append(torch.is_inference_mode_enabled())
        return torch.zeros_like(x_BCHW)

    run(start(WANTED, system.info()), [watching] * 3)
    assert seen
    assert all(seen)


def test_answers_in_another_precision_keep_the_state_in_its_own() -> None:
    system = closed_forms.three_gaussians()
    experts = [lambda x, t, label: torch.zeros_like(x, dtype=torch.bfloat16)] * 3
    router = lambda x, t, label: torch.zeros(len(x), 3, dtype=torch.bfloat16)  # noqa: E731
    assert run(start(WANTED, system.info()), experts).x_BCHW.dtype == torch.float64
    sampled = run(start(FULL, system.info()), experts, router).result()
    assert (sampled.images_BCHW.dtype, sampled.routing_SBK.dtype) == (torch.float64, torch.float64)


def test_drawn_experts_are_those_that_sample() -> None:
    system = closed_forms.three_gaussians()
    expert_B, num_router_rows = drawn_experts(WANTED, system.info())
    assert num_router_rows == 0
    assert torch.equal(sample(WANTED, system.info(), system.experts).experts_SB, expert_B.expand(2, 40))
    assert set(expert_B.tolist()) == {0, 1, 2}
