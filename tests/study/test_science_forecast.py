"""The forecast by Gaussian denoisers against closed forms."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch


@pytest.fixture
def module(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("science_forecast")


def test_an_isotropic_gaussians_velocity_is_in_closed_form(module: ModuleType) -> None:
    """(x - (1 - t) m) (t - (1 - t) s^2) / ((1 - t)^2 s^2 + t^2) - m."""
    random, spread = torch.Generator().manual_seed(0), 0.3
    denoiser = module.GaussianDenoiser(2.0 * torch.ones(4).double(), spread**2 * torch.ones(4).double(), eye())
    x_BCHW, t_B = torch.randn(6, 1, 2, 2, generator=random).double(), torch.linspace(0.01, 1, 6).double()
    t_B111 = t_B.view(-1, 1, 1, 1)
    slope = (t_B111 - (1 - t_B111) * spread**2) / ((1 - t_B111) ** 2 * spread**2 + t_B111**2)
    expected = (x_BCHW - (1 - t_B111) * 2) * slope - 2
    assert torch.allclose(denoiser(x_BCHW, t_B, None), expected, rtol=1e-12)


def test_the_router_is_bayes_rule(module: ModuleType) -> None:
    random, share_K = torch.Generator().manual_seed(2), torch.tensor([0.3, 0.7]).double()
    gaussians = tuple(
        module.GaussianDenoiser.of(torch.randn(500, 1, 2, 2, generator=random) * scale + scale) for scale in (0.5, 1.5)
    )
    x_BCHW, t_B = torch.randn(8, 1, 2, 2, generator=random).double(), torch.linspace(0, 1, 8).double()
    logits_BK = module.GaussianRouter(gaussians, share_K)(x_BCHW, t_B, None)
    for row, t in enumerate(t_B):
        densities = []
        for gaussian in gaussians:
            covariance_DD = gaussian.vectors_DD @ gaussian.values_D.diag() @ gaussian.vectors_DD.T
            at_t = torch.distributions.MultivariateNormal(
                (1 - t) * gaussian.mean_D, (1 - t) ** 2 * covariance_DD + t**2 * eye()
            )
            densities.append(at_t.log_prob(x_BCHW[row].flatten()).exp())
        posterior_K = share_K * torch.stack(densities)
        assert torch.allclose(logits_BK[row].softmax(0), posterior_K / posterior_K.sum(), atol=1e-9)


def eye() -> torch.Tensor:
    return torch.eye(4).double()
