import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.core.mixture import alive_prior, group_rows, mix, posterior
from ddm_ray.core.routing import Routing, keep_top
from ddm_ray.errors import SamplingError
from tests.core import closed_forms, oracles


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32), num_points=st.integers(1, 12), t=st.floats(0.02, 1.0))
def test_finite_data_of_any_partition_mixes_to_the_whole(seed: int, num_points: int, t: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(num_points + 2, 1, 2, 2, generator=generator, dtype=torch.float64)
    cluster_N = torch.randint(3, (num_points + 2,), generator=generator)
    cluster_N[0], label_N = 0, torch.zeros(num_points + 2, dtype=torch.int64)
    system = closed_forms.FiniteData(points, cluster_N, label_N)
    noise = torch.randn(4, 1, 2, 2, generator=generator, dtype=torch.float64)
    x_BCHW, label_B = (1 - t) * points[:1] + t * noise, torch.zeros(4, dtype=torch.int64)
    right = system.field_of(None)(x_BCHW, torch.full((4,), t, dtype=torch.float64), label_B)
    assert oracles.relative(oracles.mixture_field(system, x_BCHW, t, label_B), right) < 1e-12


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6), num_experts=st.integers(1, 6), data=st.data())
def test_grouped_sum_is_the_dense_sum(seed, rows, num_experts, data) -> None:
    generator = torch.Generator().manual_seed(seed)
    velocity_KBD = torch.randn(num_experts, rows, 3, generator=generator, dtype=torch.float64)
    probs_BK = torch.randn(rows, num_experts, generator=generator, dtype=torch.float64).softmax(dim=1)
    routing = keep_top(probs_BK, data.draw(st.integers(1, num_experts)))
    groups = group_rows(routing)
    found = mix(groups, [velocity_KBD[g.expert, g.rows_R] for g in groups], rows)
    dense_BK = torch.zeros_like(probs_BK).scatter(1, routing.experts_Bk, routing.weights_Bk)
    torch.testing.assert_close(found, torch.einsum("bk,kbd->bd", dense_BK, velocity_KBD))


def test_an_expert_without_weight_gets_no_rows() -> None:
    routing = Routing(torch.tensor([[3, 1], [3, 0], [1, 2]]), torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]]))
    assert [(g.expert, g.rows_R.tolist()) for g in group_rows(routing)] == [(0, [1]), (1, [2]), (3, [0, 1])]


def test_posterior_is_softmax_over_the_living() -> None:
    logits_BK = torch.tensor([[0.2, 0.3, 0.5]]).log()
    torch.testing.assert_close(posterior(logits_BK), torch.tensor([[0.2, 0.3, 0.5]]))
    alive_K = torch.tensor([True, False, True])
    torch.testing.assert_close(posterior(logits_BK, alive_K), torch.tensor([[0.2 / 0.7, 0.0, 0.5 / 0.7]]))


@pytest.mark.parametrize("logits", [[float("nan"), 0.0], [float("inf"), 0.0], [-float("inf"), -float("inf")]])
def test_logits_without_a_posterior_are_refused(logits: list[float]) -> None:
    with pytest.raises(SamplingError, match="without a posterior"):
        posterior(torch.tensor([logits]))


def test_prior_without_dead_experts() -> None:
    prior_CK = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.25, 0.25], [0.6, 0.3, 0.1]])
    found = alive_prior(prior_CK, torch.tensor([True, False, True]))
    right = torch.tensor([[0.6 / 0.7, 0, 0.1 / 0.7], [0.5 / 0.75, 0, 0.25 / 0.75], [0.6 / 0.7, 0, 0.1 / 0.7]])
    torch.testing.assert_close(found, right)
    assert alive_prior(prior_CK) is prior_CK
    only_empty = alive_prior(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([False, True, True]))
    torch.testing.assert_close(only_empty, torch.tensor([[0.0, 0.5, 0.5]]))
    with pytest.raises(SamplingError, match="no expert is alive"):
        alive_prior(prior_CK, torch.zeros(3, dtype=torch.bool))


def test_errors_per_point_tell_renormalised_from_not() -> None:
    assert oracles.top_error(1) < 0.3
    system = closed_forms.digits()
    x_BCHW, _ = oracles.finite_points(64, 0.9)
    null_B, times_B = torch.full((64,), system.num_classes), torch.full((64,), 0.9, dtype=torch.float64)
    right = system.field_of(None)(x_BCHW, times_B, null_B)
    probs_BK = system.router(x_BCHW, times_B, null_B).softmax(dim=1)
    weight_B = probs_BK.topk(2, dim=1).values.sum(dim=1)
    kept = oracles.mixture_field(system, x_BCHW, 0.9, null_B, strategy="top-2")
    off = kept * weight_B[:, None, None, None] - right
    error_B = off.flatten(1).norm(dim=1) / right.flatten(1).norm(dim=1)
    assert error_B.mean() > 1.4 * oracles.top_error(2)
