"""Guidance of a mixture: exact after mixing, the paper's by name, within an interval, within clusters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.config import SamplingSettings
from ddm_ray.core.guidance import guide
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import SampleRequest
from tests.core import closed_forms, oracles, strategy_oracles
from tests.core.test_mixture import GAUSSIANS


def test_scale_one_is_conditional_zero_is_unconditional_two_extrapolates() -> None:
    conditional, unconditional = torch.tensor([3.0]), torch.tensor([1.0])
    assert [float(guide(conditional, unconditional, scale)) for scale in (0.0, 1.0, 2.0)] == [1.0, 3.0, 5.0]


@settings(deadline=None, max_examples=25)
@given(t=st.floats(0.0, 0.97), scale=st.sampled_from([0.0, 1.0]) | st.floats(-1.0, 8.0), **GAUSSIANS)
def test_guidance_of_any_mixture_is_exact_after_mixing(t: float, scale: float, **sizes) -> None:
    sizes["num_conditions"] += 1
    oracles.check_gaussian_guidance(closed_forms.random_gaussians(**sizes), scale, t)


def test_guiding_each_expert_under_one_posterior_is_another_field() -> None:
    system = closed_forms.digits()
    x_BCHW, label_B = oracles.finite_points(32, 0.8)
    right = oracles.mixture_field(system, x_BCHW, 0.8, label_B, guidance_scale=3.0)
    each = oracles.mixture_field(system, x_BCHW, 0.8, label_B, guidance_scale=3.0, guidance_kind="per-expert")
    error_B = (each - right).flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)
    assert error_B.mean() > 0.1


@pytest.mark.parametrize("strategy", ["top-1", "once", "sticky", "sample-1"])
@pytest.mark.parametrize("kind", ["mixture", "per-expert"])
def test_sparse_strategies_guide_within_the_conditional_choice(strategy: str, kind: str) -> None:
    system = closed_forms.digits()
    x_BCHW, label_B = oracles.finite_points(16, 0.5)
    times_B, null_B = torch.full((16,), 0.5, dtype=torch.float64), torch.full((16,), system.num_classes)
    fields = {"strategy": strategy, "guidance_scale": 3.0, "guidance_kind": kind}
    actual = oracles.mixture_field(system, x_BCHW, 0.5, label_B, **fields)
    each = [guide(e(x_BCHW, times_B, label_B), e(x_BCHW, times_B, null_B), 3.0) for e in system.experts]
    off_KB = torch.stack([(field - actual).flatten(1).norm(dim=1) for field in each])
    assert off_KB.amin(dim=0).max() < 1e-10
    if strategy in ("top-1", "sticky"):
        assert torch.equal(off_KB.argmin(dim=0), system.router(x_BCHW, times_B, label_B).argmax(dim=1))


def test_two_kept_experts_share_the_conditional_weights_in_both_branches() -> None:
    system = closed_forms.guided_gaussians()
    x_BCHW, label_B = oracles.gaussian_points(system, 15)
    times_B, null_B = torch.full((15,), 0.5, dtype=torch.float64), torch.full((15,), 2)
    probs_BK = system.router(x_BCHW, times_B, label_B).softmax(dim=1)
    weights_BK = probs_BK.masked_fill(probs_BK == probs_BK.amin(dim=1, keepdim=True), 0)
    weights_BK = weights_BK / weights_BK.sum(dim=1, keepdim=True)
    each = [guide(e(x_BCHW, times_B, label_B), e(x_BCHW, times_B, null_B), 2.5) for e in system.experts]
    right = torch.einsum("bk,kbchw->bchw", weights_BK, torch.stack(each))
    actual = oracles.mixture_field(system, x_BCHW, 0.5, label_B, strategy="top-2", guidance_scale=2.5)
    assert (actual - right).abs().max() < 1e-11


def test_guided_once_draws_clusters_by_the_condition_and_guides_within() -> None:
    oracles.check_guided_once()


def test_guided_full_moves_weight_between_clusters_and_once_does_not() -> None:
    prior_CK = torch.tensor([[0.7, 0.3], [0.5, 0.5]], dtype=torch.float64)
    mean_KD, std_K = torch.tensor([[2.0], [-2.0]]).double(), torch.tensor([0.3, 0.3]).double()
    system, share = closed_forms.GaussianMixture(prior_CK, mean_KD, std_K), {}
    for strategy in ("full", "once"):
        fields = {"steps": 24, "solver": "heun", "guidance_scale": 3.0}
        images = oracles.sample_system(system, 1200, 0, strategy=strategy, **fields).images_BCHW
        share[strategy] = float((images > 0).double().mean())
    assert abs(share["once"] - 0.7) < 0.04
    assert share["full"] > 0.8


@pytest.mark.parametrize("strategy", ["full", "once", "top-1", "sample-1"])
def test_rows_paid_for_show_the_interval(strategy: str) -> None:
    """Ten Euler steps at 1, .9 ... .1: those at .3 to .7 pay twice."""
    system = closed_forms.guided_gaussians()
    plain = SamplingSettings(steps=10, strategy=strategy, solver="euler")
    unguided, per_step = SampleRequest((1, 2, 3), torch.tensor([0, 1, 0]), plain), {}
    for interval in ((0.0, 1.0), (0.25, 0.75), (0.95, 1.0), (0.0, 0.05)):
        request = unguided.changed(guidance_scale=2.0, guidance_interval=interval)
        sampled = driver.sample(request, system.info(), system.experts, system.router)
        per_step[interval] = sampled.num_expert_rows / (3 * (3 if strategy == "full" else 1))
    assert list(per_step.values()) == [20, 15, 11, 10]
    without = driver.sample(unguided, system.info(), system.experts, system.router)
    assert torch.equal(sampled.images_BCHW, without.images_BCHW)


def test_the_scale_holds_inside_the_interval_alone() -> None:
    oracles.check_guidance_interval()


def test_scale_zero_within_an_interval_is_unconditional_there_alone() -> None:
    system = closed_forms.guided_gaussians()
    x_BCHW, label_B = oracles.gaussian_points(system, 9)
    for t, seen_B in ((0.2, label_B), (0.6, torch.full((9,), 2))):
        fields = {"guidance_scale": 0.0, "guidance_interval": (0.5, 1.0)}
        actual = oracles.mixture_field(system, x_BCHW, t, label_B, **fields)
        assert torch.equal(actual, oracles.mixture_field(system, x_BCHW, t, seen_B))


@pytest.mark.parametrize(("scale", "condition"), [(0.0, -1), (1.0, 0), (3.0, 0)])
@pytest.mark.parametrize("guidance", ["mixture", "per-expert"])
def test_the_trace_shows_the_conditional_weights(scale: float, condition: int, guidance: str) -> None:
    system = closed_forms.three_gaussians()
    fields = {"guidance_scale": scale, "guidance": guidance, "steps": 2}
    sampled = oracles.sample_system(system, 5, 0, strategy="full", **fields)
    # At t = 1 a posterior is its prior.
    torch.testing.assert_close(sampled.routing_SBK[0], system.prior_CK[condition].expand(5, 3))


@pytest.mark.parametrize(("scale", "drawn_by"), [(0.0, -1), (1e-9, 0), (3.0, 0)])
def test_scale_zero_draws_clusters_without_a_condition_and_small_scales_do_not(scale: float, drawn_by: int) -> None:
    system = closed_forms.three_gaussians()
    for strategy in ("once", "sample-1"):
        sampled = oracles.sample_system(system, 1500, 0, strategy=strategy, guidance_scale=scale, steps=1)
        frequency_K = sampled.experts_SB[0].bincount(minlength=3) / 1500
        assert (frequency_K - system.prior_CK[drawn_by]).abs().max() < 0.05


@pytest.mark.parametrize("solver", oracles.EXACT)
def test_history_restarts_where_guidance_sets_in(solver: str) -> None:
    strategy_oracles.check_history_restarts_with_guidance(solver)
