"""The identities of a mixture on random ones, through the real code, and its parts by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.core.mixture import available_prior, group_rows, mix, place, posterior
from ddm_ray.core.routing import keep_top
from ddm_ray.errors import NotFiniteError, SamplingError
from tests.core import closed_forms, oracles

GAUSSIANS = {
    "seed": st.integers(0, 2**32),
    "dim": st.integers(1, 6),
    "num_experts": st.integers(1, 6),
    "num_conditions": st.integers(1, 3),
}
POINTS = {
    "seed": st.integers(0, 2**32),
    "dim": st.integers(1, 6),
    "num_experts": st.integers(1, 6),
    "num_classes": st.integers(1, 3),
}


@settings(deadline=None, max_examples=25)
@given(t=st.floats(0.02, 1.0), **POINTS)
def test_any_data_set_in_any_partition_mixes_to_the_whole(t: float, **sizes) -> None:
    oracles.check_finite_identity(closed_forms.random_points(**sizes), times=(t,))


@settings(deadline=None, max_examples=25)
@given(t=st.floats(0.0, 0.97), **GAUSSIANS)
def test_any_gaussian_mixture_has_the_field_of_its_score(t: float, **sizes) -> None:
    oracles.check_gaussian_field(closed_forms.random_gaussians(**sizes), times=(t,))


@settings(deadline=None, max_examples=25)
@given(t=st.floats(0.02, 0.97), **GAUSSIANS)
def test_scores_of_any_mixture_mix_as_its_velocities_do(t: float, **sizes) -> None:
    oracles.check_scores(closed_forms.random_gaussians(**sizes), times=(t,))


@settings(deadline=None, max_examples=25)
@given(t=st.floats(0.05, 1.0), **POINTS)
def test_a_student_taught_by_the_datums_cluster_learns_the_whole(t: float, **sizes) -> None:
    oracles.check_distillation(closed_forms.random_points(**sizes), t)


@settings(deadline=None, max_examples=8)
@given(**POINTS)
def test_any_data_set_ends_where_one_model_of_it_does(**sizes) -> None:
    oracles.check_same_endpoint(4, closed_forms.random_points(**sizes))


@settings(deadline=None, max_examples=25)
@given(t=st.floats(0.05, 1.0), kept=st.integers(1, 6), **POINTS)
def test_kept_experts_carry_the_whole_weight(t: float, kept: int, **sizes) -> None:
    kept = min(kept, sizes["num_experts"])
    system = closed_forms.random_points(**sizes)
    x_BCHW, label_B = oracles.finite_points(8, t, system=system)
    times_B = torch.full((8,), t, dtype=torch.float64)
    probs_BK = system.router(x_BCHW, times_B, label_B).softmax(dim=1)
    order_BK = probs_BK.argsort(dim=1, descending=True, stable=True)
    weights_BK = probs_BK.scatter(1, order_BK[:, kept:], 0)
    weights_BK = weights_BK / weights_BK.sum(dim=1, keepdim=True)
    each = torch.stack([expert(x_BCHW, times_B, label_B) for expert in system.experts])
    actual = oracles.mixture_field(system, x_BCHW, t, label_B, strategy=f"top-{kept}")
    right = torch.einsum("bk,kbchw->bchw", weights_BK, each)
    torch.testing.assert_close(actual, right, rtol=0, atol=1e-12 * (1 + float(each.abs().max())))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6), num_experts=st.integers(1, 6), data=st.data())
def test_grouped_sum_is_the_dense_sum(seed, rows, num_experts, data) -> None:
    generator = torch.Generator().manual_seed(seed)
    velocity_KBD = torch.randn(num_experts, rows, 3, generator=generator, dtype=torch.float64)
    probs_BK = torch.randn(rows, num_experts, generator=generator, dtype=torch.float64).softmax(dim=1)
    weights_BK = keep_top(probs_BK, data.draw(st.integers(1, num_experts)))
    groups = group_rows(weights_BK.numpy() > 0)
    velocities = [velocity_KBD[g.expert] if g.rows_R is None else velocity_KBD[g.expert, g.rows_R] for g in groups]
    right_BD = torch.einsum("bk,kbd->bd", weights_BK, velocity_KBD)
    torch.testing.assert_close(mix(groups, velocities, weights_BK), right_BD)
    if ((weights_BK > 0).sum(dim=1) == 1).all():
        torch.testing.assert_close(place(groups, velocities, rows), right_BD)


def test_an_expert_without_weight_gets_no_rows() -> None:
    used_BK = np.array([[0, 0, 0, 1, 1], [1, 0, 0, 1, 1], [0, 1, 0, 0, 1]], bool)
    rows = [(g.expert, None if g.rows_R is None else g.rows_R.tolist()) for g in group_rows(used_BK)]
    assert rows == [(0, [1]), (1, [2]), (3, [0, 1]), (4, None)]


def test_posterior_is_softmax_over_the_available() -> None:
    logits_BK = torch.tensor([[0.2, 0.3, 0.5]]).log()
    torch.testing.assert_close(posterior(logits_BK), torch.tensor([[0.2, 0.3, 0.5]]))
    available_K = torch.tensor([True, False, True])
    torch.testing.assert_close(posterior(logits_BK, available_K), torch.tensor([[0.2 / 0.7, 0.0, 0.5 / 0.7]]))
    never = torch.tensor([[0.0, -torch.inf]])
    assert posterior(never).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("logits", [[float("nan"), 0.0], [float("inf"), 0.0], [-float("inf"), -float("inf")]])
def test_logits_without_a_posterior_are_refused(logits: list[float]) -> None:
    with pytest.raises(NotFiniteError, match="without a posterior"):
        posterior(torch.tensor([logits]))


def test_a_row_that_the_available_cannot_have_made_falls_back_to_their_prior() -> None:
    logits_BK, available_K = (
        torch.tensor([[0.0, -torch.inf, -torch.inf], [0.0, 0.0, 0.0]]),
        torch.tensor([False, True, True]),
    )
    right_BK = torch.tensor([[0.0, 0.75, 0.25], [0.0, 0.5, 0.5]])
    torch.testing.assert_close(posterior(logits_BK, available_K, torch.tensor([0.6, 0.3, 0.1])), right_BK)
    torch.testing.assert_close(posterior(logits_BK, available_K), torch.tensor([[0.0, 0.5, 0.5]]).expand(2, 3))
    torch.testing.assert_close(
        posterior(logits_BK, available_K, torch.tensor([1.0, 0.0, 0.0]))[0], torch.tensor([0, 0.5, 0.5])
    )


def test_prior_without_missing_experts() -> None:
    prior_CK = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.25, 0.25], [0.6, 0.3, 0.1]])
    actual = available_prior(prior_CK, torch.tensor([True, False, True]))
    right = torch.tensor([[0.6 / 0.7, 0, 0.1 / 0.7], [0.5 / 0.75, 0, 0.25 / 0.75], [0.6 / 0.7, 0, 0.1 / 0.7]])
    torch.testing.assert_close(actual, right)
    assert available_prior(prior_CK) is prior_CK
    only_empty = available_prior(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([False, True, True]))
    torch.testing.assert_close(only_empty, torch.tensor([[0.0, 0.5, 0.5]]))
    with pytest.raises(SamplingError, match="no expert is available"):
        available_prior(prior_CK, torch.zeros(3, dtype=torch.bool))
