"""The temperature of a router, which corrects how sure it is.

Shapes: N rows, K experts.
"""

import math

import torch
from torch import Tensor

from ddm_ray.errors import NotFiniteError

MAX_TEMPERATURE = 1e3


def tempered(logits_NK: Tensor, temperature: float) -> Tensor:
    """The logits over the router's temperature; themselves for 1."""
    return logits_NK if temperature == 1 else logits_NK / temperature


def fit_temperature(logits_NK: Tensor, expert_N: Tensor) -> float:
    """The temperature (0.001 to 1,000) with the least cross-entropy of the true experts, on held-out rows.

    Temperature scaling (Guo et al. 2017, arXiv 1706.04599, section 4.2). The cross-entropy is convex in 1 / T, so
    bisection of its slope finds the only minimum. Constant logits, which fit as well at any T, answer 1. Logits may be
    -inf; rows where the true expert has one cost the same at any T and are left out. NotFiniteError for rows without a
    posterior.
    """
    logits_NK = logits_NK.double()
    if not logits_NK.softmax(dim=1).isfinite().all():
        raise NotFiniteError("the router gave logits without a posterior (NaN, or -inf for every expert): check it")
    possible_N = logits_NK.gather(1, expert_N[:, None])[:, 0] > -math.inf
    logits_NK, expert_N = logits_NK[possible_N], expert_N[possible_N]
    logits_NK = logits_NK - logits_NK.amax(dim=1, keepdim=True)
    # The softmax is 0 at -inf: a finite number there keeps their product 0.
    finite_NK = logits_NK.masked_fill(logits_NK == -math.inf, 0)
    if not finite_NK.any():
        return 1.0
    true_N = logits_NK.gather(1, expert_N[:, None])[:, 0]

    def slope(inverse: float) -> float:
        expected_N = ((logits_NK * inverse).softmax(dim=1) * finite_NK).sum(dim=1)
        return float((expected_N - true_N).mean())

    # Bisected in log(1 / T), so that small and large temperatures are as precise.
    low, high = -math.log(MAX_TEMPERATURE), math.log(MAX_TEMPERATURE)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


def cross_entropy(logits_NK: Tensor, expert_N: Tensor, temperature: float = 1.0) -> float:
    """Mean of -log p(true expert), in nats."""
    return float(torch.nn.functional.cross_entropy(logits_NK.double() / temperature, expert_N))
