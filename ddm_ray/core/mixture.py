"""The mixture u = sum_k p(k|x,t,c) u_k (arXiv 2501.05450): its weights, and the sum over the experts of a routing.

Shapes: B rows, K experts, C classes and the null one, R rows of one expert; ... dimensions of an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.flow import append_dims
from ddm_ray.core.transfer import upload
from ddm_ray.errors import NotFiniteError, SamplingError


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """Rows of the batch (int64 indices, None: all of them) that use one expert."""

    expert: int
    rows_R: Tensor | None


def posterior(logits_BK: Tensor, available_K: Tensor | None = None, prior_K: Tensor | None = None) -> Tensor:
    """p(k|x,t,c) from the router's logits, over the available experts (bool; None: all); rows sum to 1.

    A logit of -inf is a probability of 0. A row that gives the available experts none falls back to their marginal
    `prior_K` (None: uniform), as in `available_prior`. NotFiniteError where logits on the CPU have no posterior at all:
    elsewhere nothing waits for them. SamplingError if no expert is available.
    """
    probs_BK = logits_BK.softmax(dim=1)
    if probs_BK.is_cpu and not probs_BK.isfinite().all():
        raise NotFiniteError("the router gave logits without a posterior (NaN, or -inf for every expert): check it")
    if available_K is None or available_K.all():
        return probs_BK
    prior_1K = torch.ones(1, len(available_K)) if prior_K is None else prior_K[None]
    marginal_1K = available_prior(prior_1K.to(probs_BK.dtype), available_K)
    missing_K, marginal_1K = (upload(part.numpy(), logits_BK.device) for part in (~available_K, marginal_1K))
    available_BK = logits_BK.masked_fill(missing_K, -torch.inf).softmax(dim=1)
    # What had no posterior before keeps none, so that the images show it.
    return torch.where(probs_BK.isfinite() & ~available_BK.isfinite(), marginal_1K, available_BK)


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


def group_rows(used_BK: np.ndarray, device: torch.device | str = "cpu") -> list[ExpertRows]:
    """The rows of each expert that any row uses (bool), experts in ascending order; indices on `device`."""
    groups, begin, (_, row_R) = list[ExpertRows](), 0, used_BK.T.nonzero()
    for expert, count in enumerate(used_BK.sum(axis=0).tolist()):
        if count:
            rows_R = None if count == len(used_BK) else upload(row_R[begin : begin + count], device)
            groups.append(ExpertRows(expert, rows_R))
        begin += count
    return groups


def mix(groups: Sequence[ExpertRows], velocities: Sequence[Tensor], weights_BK: Tensor) -> Tensor:
    """sum_k weight_k u_k per row: velocities[i] (R, ...) belongs to groups[i]; returns (B, ...)."""
    assert len(groups) == len(velocities)
    assert groups
    # Experts come in ascending order, so a row's sum has one order whatever its batch mates are routed to.
    mixed = velocities[0].new_zeros(len(weights_BK), *velocities[0].shape[1:])
    for group, velocity in zip(groups, velocities, strict=True):
        weights_R = weights_BK[:, group.expert]
        weights_R = append_dims(weights_R if group.rows_R is None else weights_R[group.rows_R], velocity)
        weighed = weights_R * velocity
        if not weighed.is_cpu:
            # An expert without a weight may be asked there, and 0 times infinity is no number.
            weighed = torch.where(weights_R == 0, 0, weighed)
        if group.rows_R is None:
            mixed += weighed
        else:
            mixed.index_add_(0, group.rows_R, weighed)
    return mixed


def place(groups: Sequence[ExpertRows], velocities: Sequence[Tensor], num_rows: int) -> Tensor:
    """`mix` of rows that use one expert each, by weight 1."""
    if len(groups) == 1:
        return velocities[0]
    placed = velocities[0].new_empty(num_rows, *velocities[0].shape[1:])
    for group, velocity in zip(groups, velocities, strict=True):
        assert group.rows_R is not None
        placed.index_copy_(0, group.rows_R, velocity)
    return placed
