"""Strategies by name: grammar, what every routing promises, and how far each bends the mixture."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.core.names import STRATEGIES
from ddm_ray.core.routing import (
    Full,
    Nucleus,
    Once,
    Oracle,
    SampleK,
    TopK,
    differs,
    draw_expert,
    keep,
    keep_top,
    parse_strategy,
)
from ddm_ray.errors import SamplingError
from tests.core import closed_forms, oracles, strategy_oracles
from tests.core.strategy_oracles import probabilities, route

EVERY = (
    *(form.example for form in STRATEGIES.values()),
    *("top-1", "sample-2", "sticky-0.4", "threshold-0.9", "nucleus-0.4", "nucleus-1", "nucleus-0.9-0.5"),
    "nucleus-0.9-4",
)
NAMES = (
    *EVERY,
    *("", " ", "Full", "full ", "once-1", "oracle-2", "top", "top-", "top-0", "top-01", "top-1.5", "top--1", "top-8"),
    *("top-9", "top-10", "top1", "sample", "sample-0", "sample-8", "sample-9", "sample-2.0", "sticky-", "sticky-0"),
    *("sticky-1", "sticky-1.0", "sticky-0.999", "sticky--0.1", "sticky-.1", "sticky-0.1-0.1", "sticky-1e-3"),
    *("threshold", "threshold-0", "threshold-0.0", "threshold-1", "threshold-1.0", "threshold-01", "threshold-.5"),
    *("threshold-0.5.5", "threshold-nan", "nucleus", "nucleus-0", "nucleus-1.0", "nucleus-1.01", "nucleus-0.9-0"),
    *("nucleus-0.9-0.0", "nucleus-0.9-", "nucleus-0.9-1-1", "nucleus-0.9--1", "nucleus-0.9-10", "nucleus-2-1"),
    *("full\n", "top-2\n", "nucleus-inf", "top_2", "TOP-2", "k-2", "argmax"),
)


def test_names_are_accepted_and_refused_as_documented() -> None:
    accepted = {*EVERY, "top-8", "sample-8", "sticky-0", "sticky-0.999", "nucleus-1.0", "nucleus-0.9-10"}
    for name in accepted:
        parse_strategy(name, 8)
    for name in set(NAMES) - accepted:
        with pytest.raises(SamplingError, match=r"for 8 experts: use once, full, .*\(k from 1 to 8\)") as error:
            parse_strategy(name, 8)
        assert str(error.value).startswith(f"unknown strategy {name!r} ") and "\n" not in str(error.value)
    assert parse_strategy("sticky", 8) == parse_strategy("sticky-0.1", 8)
    assert parse_strategy("nucleus-0.9-0.5", 8) == Nucleus(0.9, 0.5) != parse_strategy("nucleus-0.9", 8)
    assert (parse_strategy("top-2", 2), parse_strategy("sample-2", 2)) == (TopK(2), SampleK(2))
    with pytest.raises(SamplingError, match="for 2 experts"):
        parse_strategy("top-3", 2)


def test_when_each_strategy_chooses() -> None:
    assert [s.when for s in (Full(), TopK(2), Once(), Oracle())] == ["velocity", "step", "start", "start"]
    assert {name for name in EVERY if parse_strategy(name, 2).draws} == {"once", "sample-1", "sample-2"}


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 5),
    num_experts=st.integers(2, 9),
    name=st.sampled_from(EVERY),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    data=st.data(),
)
def test_what_every_routing_promises(seed, rows, num_experts, name, spread, dtype, data) -> None:
    probs_BK = probabilities(seed, rows, num_experts, spread)
    dead = data.draw(st.sets(st.integers(0, num_experts - 1), max_size=num_experts - 1))
    if name == "oracle":
        probs_BK = torch.nn.functional.one_hot(probs_BK.argmax(dim=1), num_experts).double()
        dead = {k for k in dead if not (probs_BK[:, k] > 0).any()}
    probs_BK[:, list(dead)] = 0
    if not (probs_BK.sum(dim=1) > 0).all():
        # At the widest spread a row may have lived in the dead experts alone.
        probs_BK[:, [k for k in range(num_experts) if k not in dead]] += 1e-6
    probs_BK = (probs_BK / probs_BK.sum(dim=1, keepdim=True)).to(dtype)
    weights_BK = None
    for step in range(3):
        weights_BK = route(name, probs_BK, weights_BK, step)
        assert weights_BK.shape == (rows, num_experts)
        assert weights_BK.dtype == dtype
        assert (weights_BK >= 0).all()
        torch.testing.assert_close(weights_BK.sum(dim=1), torch.ones(rows, dtype=dtype))
        assert (weights_BK[:, list(dead)] == 0).all()
        if name not in ("once", "oracle", "nucleus-0.9-0.5", "nucleus-0.9-4"):
            # Experts that are kept stay in the proportions of their probabilities.
            kept_BK = probs_BK * (weights_BK > 0)
            torch.testing.assert_close(weights_BK, kept_BK / kept_BK.sum(dim=1, keepdim=True), rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6), num_experts=st.integers(1, 9))
def test_where_strategies_meet(seed, rows, num_experts) -> None:
    probs_BK = probabilities(seed, rows, num_experts)
    full_BK = route("full", probs_BK)
    torch.testing.assert_close(full_BK, probs_BK)
    for name in (f"top-{num_experts}", f"sample-{num_experts}", "nucleus-1", "threshold-0.000000000001"):
        torch.testing.assert_close(route(name, probs_BK), full_BK, rtol=0, atol=1e-11)
    top_BK = route("top-1", probs_BK)
    for name in ("threshold-0.999999", "nucleus-0.000001", "nucleus-0.9-0.000000000001", "sticky"):
        assert torch.equal(route(name, probs_BK), top_BK)
    # At an endless temperature all experts are alike.
    assert route(f"nucleus-0.9-{'9' * 20}", probs_BK).isfinite().all()
    before = route("sticky-0", probs_BK)
    later_BK = probabilities(seed + 1, rows, num_experts)
    assert torch.equal(route("sticky-0", later_BK, before), route("top-1", later_BK))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), rows=st.integers(2, 8), name=st.sampled_from(EVERY))
def test_a_row_is_routed_as_if_alone(seed, rows, name) -> None:
    probs_BK, later_BK = probabilities(seed, rows, 4), probabilities(seed + 1, rows, 4)
    strategy, uniforms_BK = parse_strategy(name, 4), probabilities(seed + 2, rows, 4)
    none_BK = torch.zeros_like(probs_BK)
    first = strategy.route(probs_BK, none_BK, uniforms_BK)
    together = strategy.route(later_BK, first, uniforms_BK)
    for row in range(rows):
        alone = strategy.route(probs_BK[row : row + 1], none_BK[:1], uniforms_BK[row : row + 1])
        alone = strategy.route(later_BK[row : row + 1], alone, uniforms_BK[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_what_a_strategy_drops_is_bounded_as_documented() -> None:
    probs_BK = probabilities(1, 400, 7, spread=1.0)
    for mass in (0.5, 0.9):
        kept_BK = route(f"nucleus-{mass}", probs_BK) > 0
        assert ((probs_BK * ~kept_BK).sum(dim=1) <= 1 - mass + 1e-12).all()
    for least in (0.05, 0.2):
        kept_BK = route(f"threshold-{least}", probs_BK) > 0
        assert ((probs_BK * ~kept_BK).sum(dim=1) < 7 * least).all()
        assert kept_BK.sum(dim=1).max() <= 1 / least


def test_sample_1_has_the_frequencies_of_each_row() -> None:
    probs_BK = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64).repeat_interleave(4000, dim=0)
    drawn_2B = route("sample-1", probs_BK).argmax(dim=1).view(2, 4000)
    for drawn_B, probs_K in zip(drawn_2B, probs_BK[[0, -1]], strict=True):
        assert (drawn_B.bincount(minlength=3) / 4000 - probs_K).abs().max() < 0.025


def test_the_bias_of_two_drawn_experts_is_as_documented() -> None:
    probs, mean_K = (0.80, 0.15, 0.05), torch.zeros(3, dtype=torch.float64)
    for first, second in itertools.permutations(range(3), 2):
        chance = probs[first] * probs[second] / (1 - probs[first])
        mean_K += chance * strategy_oracles.renormalised(list(probs), [first, second])
    torch.testing.assert_close(mean_K, torch.tensor([0.85, 0.13, 0.02]).double(), rtol=0, atol=0.005)
    probs_BK = torch.tensor([probs], dtype=torch.float64).expand(6000, 3)
    torch.testing.assert_close(route("sample-2", probs_BK).mean(dim=0), mean_K, rtol=0, atol=0.008)


def test_extreme_uniforms_draw_an_expert_that_is_possible() -> None:
    probs_BK = torch.tensor([[0.0, 0.5, 0.0, 0.5]]).expand(3, 4)
    last = 1 - 2**-53
    uniforms_BK = torch.tensor([[0.0] * 4, [last] * 4, [last, 0.0, last, 0.0]], dtype=torch.float64)
    for name in ("once", "sample-1", "sample-2", "sample-3"):
        dense_BK = parse_strategy(name, 4).route(probs_BK, torch.zeros_like(probs_BK), uniforms_BK)
        assert (dense_BK[:, [0, 2]] == 0).all()
        torch.testing.assert_close(dense_BK.sum(dim=1), torch.ones(3))


@pytest.mark.parametrize("condition", [0, 1])
def test_how_far_each_strategy_bends_the_mixture(condition: int) -> None:
    system, off = closed_forms.three_gaussians(), {}
    names = ("full", "once", "top-1", "top-2", "sticky", "sticky-0.3", "threshold-0.01", "nucleus-0.95", "nucleus-0.5")
    for name in (*names, "nucleus-0.95-0.3", "threshold-0.2"):
        images = oracles.sample_system(system, 1500, condition, strategy=name, steps=16, solver="heun").images_BCHW
        off[name] = system.frechet(images, condition)
    assert max(off["full"], off["once"], off["threshold-0.01"], off["nucleus-0.95"]) < 0.012
    assert min(off["nucleus-0.5"], off["nucleus-0.95-0.3"]) > 0.08
    assert 0.01 < off["top-2"] < 0.15
    assert off["threshold-0.2"] < 0.15
    # Sticky starts where top-1 does and leaves it later still.
    assert 0.3 < off["top-1"] < off["sticky"] < off["sticky-0.3"]


def test_more_steps_bring_sample_1_to_full_but_do_not_mend_top_1() -> None:
    strategy_oracles.check_sample_1_tends_to_full()
    system = closed_forms.three_gaussians()
    images = oracles.sample_system(system, 1500, 1, strategy="top-1", steps=100, solver="euler").images_BCHW
    assert system.frechet(images, 1) > 0.3
    drawn = oracles.sample_system(system, 500, 1, strategy="sample-1", steps=32, solver="heun").images_BCHW
    assert system.frechet(drawn, 1) < 0.03
    pairs = oracles.sample_system(system, 500, 1, strategy="sample-2", steps=32, solver="heun").images_BCHW
    frequency_K = torch.cdist(pairs.flatten(1), system.mean_CKD[1]).argmin(dim=1).bincount(minlength=3) / 500
    assert frequency_K[0] > system.prior_CK[1, 0]


def test_ties_go_to_the_lower_expert() -> None:
    assert keep_top(torch.full((1, 20), 0.05), 3).nonzero()[:, 1].tolist() == [0, 1, 2]
    assert keep_top(torch.full((1, 20), 0.05), 1).nonzero()[:, 1].tolist() == [0]
    assert route("nucleus-0.09", torch.full((1, 20), 0.05)).nonzero()[:, 1].tolist() == [0, 1]


def test_numbers_on_the_boundary() -> None:
    """Sticky leaves for more than its margin, a threshold keeps what is at least it, a nucleus stops at its mass."""
    held, later_BK = route("sticky-0.25", torch.tensor([[0.75, 0.25]])), torch.tensor([[0.375, 0.625]])
    assert route("sticky-0.25", later_BK, held).tolist() == [[1.0, 0.0]]
    assert route("sticky-0.24", later_BK, held).tolist() == [[0.0, 1.0]]
    probs_BK = torch.tensor([[0.5, 0.25, 0.25]])
    assert route("threshold-0.25", probs_BK).tolist() == [[0.5, 0.25, 0.25]]
    assert route("threshold-0.26", probs_BK).tolist() == [[1.0, 0.0, 0.0]]
    assert route("nucleus-0.5", probs_BK).tolist() == [[1.0, 0.0, 0.0]]
    torch.testing.assert_close(route("nucleus-0.75", probs_BK), torch.tensor([[2 / 3, 1 / 3, 0.0]]))


def test_keep_renormalises() -> None:
    routing = keep(torch.tensor([[0.2, 0.3, 0.5]]), torch.tensor([[True, False, True]]))
    torch.testing.assert_close(routing, torch.tensor([[2 / 7, 0.0, 5 / 7]]))


def test_draw_is_the_inverse_cdf() -> None:
    strategy_oracles.check_draw()
    prior_BK = torch.tensor([[0.0, 0.25, 0.0, 0.75]]).expand(6, 4)
    uniforms_B = torch.tensor([0.0, 0.2, 0.2499, 0.25, 0.9, 1 - 2**-53], dtype=torch.float64)
    weights_BK = draw_expert(prior_BK, uniforms_B)
    assert weights_BK.argmax(dim=1).tolist() == [1, 1, 1, 3, 3, 3]
    assert weights_BK.sort(dim=1).values.tolist() == [[0.0, 0.0, 0.0, 1.0]] * 6


def test_draw_never_picks_an_impossible_expert_at_the_end() -> None:
    prior_BK = torch.tensor([[0.3, 0.7, 0.0]])
    assert draw_expert(prior_BK, torch.tensor([1 - 2**-53], dtype=torch.float64)).argmax() == 1


def test_rounding_leaves_no_gap_at_the_end_of_the_cdf() -> None:
    prior_BK = torch.tensor([[0.9, 0.1]], dtype=torch.float32)
    assert prior_BK.double().sum() < 1 - 1e-8
    assert draw_expert(prior_BK, torch.tensor([1 - 1e-9], dtype=torch.float64)).argmax() == 1


def test_sets_of_experts_are_compared_without_their_weights() -> None:
    one_BK = torch.tensor([[0.9, 0.1, 0.0], [0.9, 0.1, 0.0], [0.9, 0.1, 0.0], [0.0, 0.0, 1.0]])
    two_BK = torch.tensor([[0.4, 0.6, 0.0], [0.6, 0.0, 0.4], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert differs(one_BK, two_BK).tolist() == [False, True, True, False]


def test_weights_stay_where_all_held_experts_have_become_impossible() -> None:
    held = route("top-2", torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]]))
    actual = TopK(2).reweigh(held, torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.5]]))
    torch.testing.assert_close(actual, torch.tensor([[2 / 3, 1 / 3, 0.0], [0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("name", [name for name in EVERY if parse_strategy(name, 8).when == "start"])
def test_what_is_chosen_at_the_start_is_one_expert_an_image(name: str) -> None:
    probs_BK = torch.full((3, 8), 1 / 8)
    assert ((route(name, probs_BK) == 1).sum(dim=1) == 1).all()
