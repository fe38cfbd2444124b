import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.core.routing import Full, Once, Routing, TopK, draw, keep_top, parse_strategy
from ddm_ray.errors import SamplingError


def probabilities(seed: int, rows: int, num_experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(rows, num_experts, generator=generator, dtype=torch.float64)).softmax(dim=1)


@pytest.mark.parametrize("name", ["full", "once", "top-1", "top-3", "top-8"])
def test_strategies_answer_to_their_names(name: str) -> None:
    assert parse_strategy(name, 8).name == name


def test_what_each_strategy_needs() -> None:
    asked = [(s.needs_router, s.every_velocity) for s in (Full(), TopK(2), Once())]
    assert asked == [(True, True), (True, False), (False, False)]


@pytest.mark.parametrize("name", ["", "Full", "top-0", "top-9", "top-2.5", "top-", "top-01", "nucleus", "top1"])
def test_an_unknown_strategy_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(SamplingError, match="full, once or top-1 to top-8"):
        parse_strategy(name, 8)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6), num_experts=st.integers(1, 9), data=st.data())
def test_top_keeps_the_likeliest_in_proportion(seed, rows, num_experts, data) -> None:
    probs_BK = probabilities(seed, rows, num_experts)
    kept = data.draw(st.integers(1, num_experts))
    routing = keep_top(probs_BK, kept)
    assert routing.experts_Bk.shape == (rows, kept)
    assert routing.experts_Bk.dtype == torch.int64
    assert (routing.weights_Bk >= 0).all()
    torch.testing.assert_close(routing.weights_Bk.sum(dim=1), torch.ones(rows, dtype=torch.float64))
    picked_Bk = probs_BK.gather(1, routing.experts_Bk)
    left_out = probs_BK.scatter(1, routing.experts_Bk, 0).amax(dim=1)
    assert (picked_Bk.amin(dim=1) >= left_out).all()
    share_B1 = picked_Bk.sum(dim=1, keepdim=True)
    torch.testing.assert_close(routing.weights_Bk * share_B1, picked_Bk)


def test_ties_go_to_the_lower_expert() -> None:
    assert keep_top(torch.full((1, 20), 0.05), 3).experts_Bk.tolist() == [[0, 1, 2]]


def test_draw_is_the_inverse_cdf() -> None:
    prior_BK = torch.tensor([[0.0, 0.25, 0.0, 0.75]]).expand(6, 4)
    uniforms_B = torch.tensor([0.0, 0.2, 0.2499, 0.25, 0.9, 1 - 2**-53], dtype=torch.float64)
    routing = draw(prior_BK, uniforms_B)
    assert routing.experts_Bk[:, 0].tolist() == [1, 1, 1, 3, 3, 3]
    assert torch.equal(routing.weights_Bk, torch.ones(6, 1))


def test_draw_never_picks_an_impossible_expert_at_the_end() -> None:
    prior_BK = torch.tensor([[0.3, 0.7, 0.0]])
    assert draw(prior_BK, torch.tensor([1 - 2**-53], dtype=torch.float64)).experts_Bk.item() == 1


def test_draw_has_the_frequencies_of_each_row() -> None:
    prior_BK = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).repeat_interleave(1000, dim=0)
    uniforms_B = ((torch.arange(1000) + 0.5) / 1000).repeat(2)
    experts_2B = draw(prior_BK, uniforms_B).experts_Bk.view(2, 1000)
    assert experts_2B[0].bincount(minlength=3).tolist() == [500, 300, 200]
    assert experts_2B[1].bincount(minlength=3).tolist() == [100, 100, 800]


def test_sets_of_experts_are_compared_without_order_weights_or_padding() -> None:
    one = Routing(torch.tensor([[0, 1], [0, 1], [0, 1], [2, 0]]), torch.tensor([[0.9, 0.1]] * 3 + [[1.0, 0.0]]))
    two = Routing(torch.tensor([[1, 0], [0, 2], [0, 1], [2, 1]]), torch.tensor([[0.6, 0.4]] * 2 + [[1.0, 0.0]] * 2))
    assert one.differs(two, 3).tolist() == [False, True, True, False]


def test_heaviest_and_repeat() -> None:
    routing = Routing(torch.tensor([[4, 2], [1, 3]]), torch.tensor([[0.2, 0.8], [0.5, 0.5]]))
    assert routing.heaviest().tolist() == [2, 1]
    assert routing.repeat(2).experts_Bk.tolist() == [[4, 2], [1, 3], [4, 2], [1, 3]]
