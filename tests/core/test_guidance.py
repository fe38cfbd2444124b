import pytest
import torch

from ddm_ray.core.guidance import guide
from tests.core import closed_forms, oracles


def test_scale_one_is_conditional_zero_is_unconditional_two_extrapolates() -> None:
    conditional, unconditional = torch.tensor([3.0]), torch.tensor([1.0])
    assert [float(guide(conditional, unconditional, scale)) for scale in (0.0, 1.0, 2.0)] == [1.0, 3.0, 5.0]


def test_guidance_after_mixing_is_that_of_the_whole() -> None:
    oracles.check_guidance()


def test_guiding_each_expert_under_one_posterior_is_another_field() -> None:
    system = closed_forms.digits()
    x_BCHW, label_B = oracles.finite_points(32, 0.8)
    times_B, null_B = torch.full((32,), 0.8, dtype=torch.float64), torch.full((32,), system.num_classes)
    right = oracles.mixture_field(system, x_BCHW, 0.8, label_B, scale=3.0)
    probs_BK = system.router(x_BCHW, times_B, label_B).softmax(dim=1)
    each = torch.zeros_like(right)
    for k, expert in enumerate(system.experts):
        guided = guide(expert(x_BCHW, times_B, label_B), expert(x_BCHW, times_B, null_B), 3.0)
        each += probs_BK[:, k, None, None, None] * guided
    error_B = (each - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)
    assert error_B.mean() > 0.1


@pytest.mark.parametrize("strategy", ["top-1", "once"])
def test_sparse_strategies_guide_within_the_conditional_choice(strategy: str) -> None:
    system = closed_forms.digits()
    x_BCHW, label_B = oracles.finite_points(16, 0.5)
    times_B, null_B = torch.full((16,), 0.5, dtype=torch.float64), torch.full((16,), system.num_classes)
    found = oracles.mixture_field(system, x_BCHW, 0.5, label_B, strategy=strategy, scale=3.0)
    fields = [guide(e(x_BCHW, times_B, label_B), e(x_BCHW, times_B, null_B), 3.0) for e in system.experts]
    off_KB = torch.stack([(field - found).flatten(1).norm(dim=1) for field in fields])
    assert off_KB.amin(dim=0).max() < 1e-10
    if strategy == "top-1":
        chosen_B = system.router(x_BCHW, times_B, label_B).argmax(dim=1)
        assert torch.equal(off_KB.argmin(dim=0), chosen_B)
