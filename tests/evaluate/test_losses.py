"""Held-out losses of closed-form fields. Data are 0, so x_t = t noise, and x / t is the exact velocity."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ddm_ray.data.loader import Rows
from ddm_ray.evaluate.losses import BINS, Loss, heldout_losses
from ddm_ray.sampling.checkpoint import Models
from ddm_ray.sampling.trajectory import MixtureInfo

POSTERIOR = (0.6, 0.3, 0.1)
SHAPE = (1, 2, 2)


def exact(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    return x / t.view(-1, 1, 1, 1)


def nothing(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    return torch.zeros_like(x)


def late(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    return exact(x, t, label) * (t >= 0.5).view(-1, 1, 1, 1)


def router(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
    return torch.tensor(POSTERIOR).log().expand(len(x), -1)


def losses(monolith=nothing, experts=(exact, nothing, nothing), seed: int = 0) -> dict[str, Loss]:
    count = 40
    info = MixtureInfo(3, SHAPE, 2, torch.full((3, 3), 1 / 3))
    labels = torch.zeros(count, dtype=torch.int64)
    rows = Rows([str(n) for n in range(count)], torch.zeros(count, *SHAPE), labels, torch.arange(count) % 2)
    mixture = Models(info, experts, router)
    alone = Models(replace(info, num_experts=1, prior_CK=torch.ones(3, 1)), (monolith,), None)
    return {loss.model: loss for loss in heldout_losses(mixture, alone, rows, seed)}


def test_losses_are_the_squares_of_the_weight_that_is_missing() -> None:
    """u is right by the share p of the exact expert, so the loss is (1 - p)^2 times that of doing nothing."""
    found = losses()
    base = found["monolith"].loss
    assert base == pytest.approx(1, rel=0.1)
    assert found["full"].loss == pytest.approx(0.4**2 * base, rel=1e-5)
    assert found["top-1"].loss == pytest.approx(0, abs=1e-6)
    assert found["top-2"].loss == pytest.approx((1 / 3) ** 2 * base, rel=1e-4)
    assert found["own cluster"].loss == pytest.approx(base / 2, rel=0.15)


def test_all_models_meet_the_same_noise_and_times() -> None:
    found = losses(monolith=late, experts=(late, late, late))
    for loss in found.values():
        assert loss.by_t == pytest.approx(found["monolith"].by_t, rel=1e-5)


def test_by_t_tells_where_a_model_is_wrong() -> None:
    by_t = losses(monolith=late)["monolith"].by_t
    assert len(by_t) == BINS
    assert min(by_t[:5]) > 0.5
    assert max(by_t[5:]) < 1e-9


def test_the_standard_error_covers_another_draw() -> None:
    first, second = (losses(seed=seed)["monolith"] for seed in (0, 1))
    assert 0 < abs(first.loss - second.loss) < 5 * first.std_error
