"""The temperature of a router: a known one recovered, and undone exactly."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.core.calibration import MAX_TEMPERATURE, cross_entropy, fit_temperature, tempered
from ddm_ray.errors import NotFiniteError
from tests.core import closed_forms, strategy_oracles
from tests.core.test_mixture import GAUSSIANS


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.3])
def test_a_known_temperature_is_found(temperature: float) -> None:
    strategy_oracles.check_fit_temperature(temperature)


def test_the_temperature_stays_within_its_bounds() -> None:
    logits_NK, right_N, wrong_N = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]), torch.tensor([1, 0])
    sure = fit_temperature(logits_NK, right_N)
    assert 1 / MAX_TEMPERATURE <= sure < 0.1
    assert cross_entropy(logits_NK, right_N, sure) < 1e-12
    assert math.isclose(fit_temperature(logits_NK, wrong_N), MAX_TEMPERATURE, rel_tol=1e-6)


def test_constant_logits_say_nothing_of_a_temperature() -> None:
    expert_N = torch.tensor([0, 1, 2, 0])
    assert fit_temperature(torch.zeros(4, 3), expert_N) == 1
    assert fit_temperature(torch.tensor([[0.1], [-7.3], [1e9], [3.0]]).expand(4, 3), expert_N) == 1
    halves_NK = torch.tensor([[0.0, 0.0, -math.inf]]).expand(4, 3)
    assert fit_temperature(halves_NK, torch.tensor([0, 1, 1, 2])) == 1
    assert fit_temperature(torch.zeros(0, 3), expert_N[:0]) == 1


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.3])
def test_impossible_experts_leave_the_temperature_as_it_is(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NK = 2 * torch.randn(4000, 5, generator=generator, dtype=torch.float64)
    expert_N = torch.multinomial((logits_NK / temperature).softmax(dim=1), 1, generator=generator)[:, 0]
    right = fit_temperature(logits_NK, expert_N)
    assert abs(right / temperature - 1) < 0.1
    never_N1 = torch.full((4000, 1), -math.inf)
    assert fit_temperature(torch.cat([logits_NK, never_N1], dim=1), expert_N) == pytest.approx(right, rel=1e-9)
    # Rows of an expert that was called impossible cost the same at any temperature.
    surprises_NK = torch.cat([logits_NK[:50], never_N1[:50]], dim=1)
    actual = fit_temperature(
        torch.cat([torch.cat([logits_NK, never_N1], dim=1), surprises_NK]), torch.cat([expert_N, torch.full((50,), 5)])
    )
    assert actual == pytest.approx(right, rel=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_temperature_of_broken_logits_is_refused(value: float) -> None:
    with pytest.raises(NotFiniteError, match="without a posterior"):
        fit_temperature(torch.tensor([[0.0, 1.0], [value, 0.0]]), torch.tensor([0, 1]))


def test_cross_entropy_is_that_of_the_tempered_softmax() -> None:
    logits_NK, expert_N = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, -1.0]]), torch.tensor([0, 2])
    probs_NK = (logits_NK.double() / 2).softmax(dim=1)
    right = -(probs_NK[0, 0].log() + probs_NK[1, 2].log()) / 2
    assert math.isclose(cross_entropy(logits_NK, expert_N, 2.0), float(right), rel_tol=1e-12)


@settings(deadline=None, max_examples=25)
@given(temperature=st.floats(0.2, 5.0), **GAUSSIANS)
def test_the_temperature_gives_the_datas_field_back(temperature: float, **sizes) -> None:
    strategy_oracles.check_router_temperature(closed_forms.random_gaussians(**sizes), temperature)


def test_a_temperature_of_one_leaves_logits_alone() -> None:
    logits_NK = torch.randn(4, 3)
    assert tempered(logits_NK, 1.0) is logits_NK
    assert torch.equal(tempered(logits_NK, 2.0), logits_NK / 2)
