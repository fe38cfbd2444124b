"""The mixture u = sum_k p(k|x,t,c) u_k: its weights, and the sum over the experts that a routing names.

Shapes: B rows, K experts, C classes and the null one, R rows of one expert; ... dimensions of an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm_ray.core.flow import along_batch
from ddm_ray.core.routing import Routing
from ddm_ray.errors import NotFiniteError, SamplingError


@dataclass(frozen=True)
class ExpertRows:
    """The rows (int64 indices into the batch) that one expert works on, and its weight in each, above 0."""

    expert: int
    rows_R: Tensor
    weights_R: Tensor


def posterior(logits_BK: Tensor, alive_K: Tensor | None = None) -> Tensor:
    """p(k|x,t,c) from the router's logits, over the experts that are alive (bool; None: all); rows sum to 1.

    A logit of -inf is a probability of 0. NotFiniteError where a row has no finite probability.
    """
    if alive_K is not None:
        logits_BK = logits_BK.masked_fill(~alive_K, -torch.inf)
    probs_BK = logits_BK.softmax(dim=1)
    if not probs_BK.isfinite().all():
        raise NotFiniteError("the router gave logits without a posterior (NaN, or no expert alive): check it")
    return probs_BK


def alive_prior(prior_CK: Tensor, alive_K: Tensor | None = None) -> Tensor:
    """p(k|c) renormalised over the experts that are alive; the last row is the marginal p(k).

    A class that lives in dead experts alone falls back to the marginal over the living, and that to uniform.
    SamplingError if no expert is alive.
    """
    if alive_K is None:
        return prior_CK
    if not alive_K.any():
        raise SamplingError("no expert is alive: sampling needs one at least")
    masked_CK = prior_CK * alive_K
    marginal_K = masked_CK[-1] if masked_CK[-1].sum() > 0 else alive_K.to(prior_CK.dtype)
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
        weights = along_batch(group.weights_R.to(velocity.dtype), velocity)
        mixed.index_add_(0, group.rows_R, weights * velocity)
    return mixed
