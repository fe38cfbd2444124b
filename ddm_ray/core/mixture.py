"""The mixture u = sum_k p(k|x,t,c) u_k (arXiv 2501.05450): its weights, and the sum over the experts of a routing.

Shapes: B rows, K experts, C classes and the null one, R rows of one expert; ... dimensions of an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm_ray.core.flow import append_dims
from ddm_ray.core.routing import Routing
from ddm_ray.errors import NotFiniteError, SamplingError


@dataclass(frozen=True)
class ExpertRows:
    """Rows of the batch (int64 indices) that use one expert, and its weight in each, above 0."""

    expert: int
    rows_R: Tensor
    weights_R: Tensor


def posterior(logits_BK: Tensor, available_K: Tensor | None = None, prior_K: Tensor | None = None) -> Tensor:
    """p(k|x,t,c) from the router's logits, over the available experts (bool; None: all); rows sum to 1.

    A logit of -inf is a probability of 0. A row that gives the available experts none falls back to their marginal
    `prior_K` (None: uniform), as in `available_prior`. NotFiniteError where the logits have no posterior at all,
    SamplingError if no expert is available.
    """
    probs_BK = logits_BK.softmax(dim=1)
    if not probs_BK.isfinite().all():
        raise NotFiniteError("the router gave logits without a posterior (NaN, or -inf for every expert): check it")
    if available_K is None or available_K.all():
        return probs_BK
    prior_1K = torch.ones_like(probs_BK[:1]) if prior_K is None else prior_K[None].to(probs_BK)
    marginal_1K = available_prior(prior_1K, available_K)
    probs_BK = logits_BK.masked_fill(~available_K, -torch.inf).softmax(dim=1)
    return torch.where(probs_BK.isfinite(), probs_BK, marginal_1K)


def available_prior(prior_CK: Tensor, available_K: Tensor | None = None) -> Tensor:
    """p(k|c), (C, K), renormalised over the available experts; the last row is the marginal p(k).

    A class that none of these has falls back to their marginal, and that to uniform.
    SamplingError if no expert is available.
    """
    if available_K is None:
        return prior_CK
    if not available_K.any():
        raise SamplingError("no expert is available: sampling needs one at least")
    masked_CK = prior_CK * available_K
    marginal_K = masked_CK[-1] if masked_CK[-1].sum() > 0 else available_K.to(prior_CK.dtype)
    masked_CK = torch.where(masked_CK.sum(dim=1, keepdim=True) > 0, masked_CK, marginal_K)
    return masked_CK / masked_CK.sum(dim=1, keepdim=True)


def group_rows(routing: Routing) -> list[ExpertRows]:
    """The rows of each expert that has a weight above 0 somewhere, experts in ascending order."""
    groups = []
    used_Bk = routing.weights_Bk > 0
    for expert in routing.experts_Bk[used_Bk].unique().tolist():
        rows_R, slots_R = torch.nonzero(used_Bk & (routing.experts_Bk == expert), as_tuple=True)
        groups.append(ExpertRows(expert, rows_R, routing.weights_Bk[rows_R, slots_R]))
    return groups


def mix(groups: Sequence[ExpertRows], velocities: Sequence[Tensor], num_rows: int) -> Tensor:
    """sum_k weight_k u_k per row: velocities[i] (R, ...) belongs to groups[i]; returns (num_rows, ...)."""
    assert len(groups) == len(velocities)
    assert groups
    # Experts come in ascending order, so a row's sum has one order whatever its batch mates are routed to.
    mixed = velocities[0].new_zeros(num_rows, *velocities[0].shape[1:])
    for group, velocity in zip(groups, velocities, strict=True):
        weights = append_dims(group.weights_R.to(velocity.dtype), velocity)
        mixed.index_add_(0, group.rows_R, weights * velocity)
    return mixed
