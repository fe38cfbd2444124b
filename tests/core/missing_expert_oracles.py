"""What experts that are missing leave of a mixture, as checks that raise AssertionError on a wrong answer.

Shapes: B rows, K experts.
"""

import torch

from ddm_ray.config import SamplingSettings
from ddm_ray.core import mixture
from ddm_ray.sampling import driver
from ddm_ray.sampling.request import SampleRequest
from tests.core import closed_forms, oracles, strategy_oracles


def check_missing_expert() -> None:
    """Without expert 2 the field is that of the data without its cluster."""
    system = closed_forms.digits()
    kept_N = system.cluster_N != 2
    rest = closed_forms.FiniteData(
        system.points_ND[kept_N].view(-1, 1, 8, 8), system.cluster_N[kept_N], system.label_N[kept_N]
    )
    experts = [None if k == 2 else expert for k, expert in enumerate(system.experts)]
    for t in (0.3, 0.9):
        x_BCHW, _ = oracles.finite_points(8, t, seed=3)
        null_B = torch.full((8,), system.num_classes)
        right = rest.field_of(None)(x_BCHW, torch.full((8,), t, dtype=torch.float64), null_B)
        assert oracles.relative(oracles.mixture_field(system, x_BCHW, t, null_B, experts=experts), right) < 1e-12


def check_available_prior() -> None:
    """Without an expert `once` draws the others by p(k|c) renormalised, and never that one."""
    system = closed_forms.three_gaussians()
    label_B = torch.ones(3000, dtype=torch.int64)
    request = SampleRequest(tuple(range(3000)), label_B, SamplingSettings(steps=1))
    sampled = driver.sample(request, system.info(), [None, *system.experts[1:]])
    frequency_K = sampled.experts_SB[0].bincount(minlength=3) / 3000
    right_K = torch.tensor([0.0, 0.30 / 0.49, 0.19 / 0.49])
    assert frequency_K[0] == 0
    assert (frequency_K - right_K).abs().max() < 0.03


def check_impossible_experts(num_images: int = 1000) -> None:
    """A class of missing experts alone is made by the others in their own shares, by whatever strategy."""
    system = closed_forms.three_gaussians()
    system = closed_forms.GaussianMixture(
        torch.cat([torch.tensor([[1.0, 0.0, 0.0]]).double(), system.prior_CK]), system.mean_CKD[0], system.std_CK[0]
    )
    experts, right_K = [None, *system.experts[1:]], torch.tensor([0.0, 0.30 / 0.49, 0.19 / 0.49]).double()
    label_B = torch.zeros(num_images, dtype=torch.int64)
    for strategy in ("once", "full", "top-2", "nucleus-1", "sample-1"):
        request = SampleRequest(tuple(range(num_images)), label_B, SamplingSettings(steps=1, strategy=strategy))
        sampled = driver.sample(request, system.info(), experts, system.router)
        assert (sampled.routing_SBK[0].mean(dim=0) - right_K).abs().max() < 0.05, strategy
        if strategy in ("full", "top-2", "nucleus-1"):
            assert torch.allclose(sampled.routing_SBK[0], right_K.expand(num_images, 3))


def check_posterior() -> None:
    """Softmax over the available experts, weights of the others exactly 0."""
    logits_BK = strategy_oracles.probabilities(0, 8, 5).log()
    available_K = torch.tensor([True, False, True, True, False])
    actual_BK = mixture.posterior(logits_BK, available_K)
    right_BK = logits_BK.exp() * available_K
    assert torch.allclose(actual_BK, right_BK / right_BK.sum(dim=1, keepdim=True))
    assert (actual_BK[:, ~available_K] == 0).all()
