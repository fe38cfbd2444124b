"""Held-out losses of closed-form fields. Data are 0, so x_t = t noise, and x / t is the exact velocity."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ddm_ray.data.loading.loader import Rows
from ddm_ray.evaluate.losses import BINS, Loss, heldout_losses
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.run_models import Models

POSTERIOR = (0.6, 0.3, 0.1)
SHAPE = (1, 2, 2)
STRATEGIES = ("once", "full", "top-1", "top-2")


def exact(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    return x / t.view(-1, 1, 1, 1)


def nothing(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    return torch.zeros_like(x)


def late(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    return exact(x, t, label) * (t >= 0.5).view(-1, 1, 1, 1)


def router(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    return torch.tensor(POSTERIOR).log().expand(len(x), -1)


def parts(experts=(exact, nothing, nothing), count: int = 40) -> tuple[Models, Rows]:
    """The mixture, and rows of which every other one is in cluster 0, the rest in cluster 1."""
    info = MixtureInfo(3, SHAPE, 2, torch.full((3, 3), 1 / 3))
    labels = torch.zeros(count, dtype=torch.int64)
    rows = Rows([str(n) for n in range(count)], torch.zeros(count, *SHAPE), labels, torch.arange(count) % 2)
    return Models(info, experts, router), rows


def half(field):
    """A field that answers in bf16, as networks do on a GPU."""
    return lambda *inputs: field(*inputs).bfloat16()


def losses(
    monolith=nothing,
    experts=(exact, nothing, nothing),
    strategies=STRATEGIES,
    seed: int = 0,
    temperature: float = 1.0,
) -> dict[str, Loss]:
    mixture, rows = parts(experts)
    alone = Models(replace(mixture.info, num_experts=1, prior_CK=torch.ones(3, 1)), (monolith,), None)
    return {
        loss.model: loss for loss in heldout_losses(mixture, {"monolith": alone}, rows, strategies, seed, temperature)
    }


def test_losses_are_the_squares_of_the_weight_that_is_missing() -> None:
    """u is right by the share p of the exact expert, so the loss is (1 - p)^2 times that of doing nothing."""
    loss_by_name = losses()
    base = loss_by_name["monolith"].loss
    assert base == pytest.approx(1, rel=0.1)
    assert loss_by_name["full"].loss == pytest.approx(0.4**2 * base, rel=1e-5)
    assert loss_by_name["top-1"].loss == pytest.approx(0, abs=1e-6)
    assert loss_by_name["top-2"].loss == pytest.approx((1 / 3) ** 2 * base, rel=1e-4)
    assert loss_by_name["own cluster"].loss == pytest.approx(base / 2, rel=0.15)


def test_the_routers_word_is_calibrated_before_it_counts() -> None:
    loss_by_name, base = losses(temperature=2.0), losses()["monolith"].loss
    tempered_K = [0.6**0.5, 0.3**0.5, 0.1**0.5]
    first, _, third = (weight / sum(tempered_K) for weight in tempered_K)
    assert loss_by_name["full"].loss == pytest.approx((1 - first) ** 2 * base, rel=1e-4)
    assert loss_by_name["top-1"].loss == pytest.approx(0, abs=1e-6)
    assert loss_by_name["top-2"].loss == pytest.approx((1 - first / (1 - third)) ** 2 * base, rel=1e-4)


def test_the_strategies_are_those_asked_for_that_have_a_velocity_of_their_own() -> None:
    loss_by_name = losses(strategies=("once", "sample-2", "sticky-0.1", "oracle", "threshold-0.2", "nucleus-0.95"))
    assert list(loss_by_name) == ["monolith", "threshold-0.2", "nucleus-0.95", "own cluster"]
    base = loss_by_name["monolith"].loss
    assert loss_by_name["threshold-0.2"].loss == pytest.approx((1 / 3) ** 2 * base, rel=1e-4)
    assert loss_by_name["nucleus-0.95"].loss == pytest.approx(0.4**2 * base, rel=1e-4)


@pytest.mark.parametrize("halved", [(), (0, 1, 2)])
def test_answers_in_bf16_are_mixed_in_the_rows_precision(halved: tuple[int, ...]) -> None:
    """A router's alone, beside fields that answer in the precision they are asked in, or all of them."""
    fields = [half(field) if k in halved else field for k, field in enumerate((exact, nothing, nothing))]
    mixture, rows = parts(tuple(fields))
    halves = heldout_losses(replace(mixture, router=half(router)), {}, rows, STRATEGIES, 0)
    right = {name: loss.loss for name, loss in losses().items() if name != "monolith"}
    assert {loss.model: loss.loss for loss in halves} == pytest.approx(right, rel=0.02, abs=1e-4)


def test_all_models_meet_the_same_noise_and_times() -> None:
    loss_by_name = losses(monolith=late, experts=(late, late, late))
    for loss in loss_by_name.values():
        assert loss.by_t == pytest.approx(loss_by_name["monolith"].by_t, rel=1e-5)


def test_by_t_tells_where_a_model_is_wrong() -> None:
    by_t = losses(monolith=late)["monolith"].by_t
    assert len(by_t) == BINS
    assert min(by_t[:5]) > 0.5
    assert max(by_t[5:]) < 1e-9


def test_the_standard_error_covers_another_draw() -> None:
    first, second = (losses(seed=seed)["monolith"] for seed in (0, 1))
    assert 0 < abs(first.loss - second.loss) < 5 * first.std_error
