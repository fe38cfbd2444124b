"""Requests cut into one for each expert, and the results of parts joined. Shapes: B images, S steps, K experts."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddm_ray.sampling.request import SampleRequest, SampleResult


def by_expert(request: SampleRequest, expert_B: Tensor) -> tuple[dict[int, SampleRequest], Tensor]:
    """Each expert's own request, where every image has one expert (int64 expert_B) from start to end.

    The second value is the `order` in which `joined` gives the images back as the request has them.
    """
    held = replace(request.changed(strategy="oracle"), cluster_B=expert_B)
    rows = {expert: torch.nonzero(expert_B == expert)[:, 0] for expert in expert_B.unique().tolist()}
    return {expert: held.rows(row_R) for expert, row_R in rows.items()}, torch.cat([*rows.values()]).argsort()


def joined(parts: Sequence[SampleResult], order: Tensor | None = None) -> SampleResult:
    """One result of the results of parts of a request, its images in `order` (int64; None: as they come)."""
    images_BCHW = torch.cat([part.images_BCHW for part in parts])
    routing_SBK = torch.cat([part.routing_SBK for part in parts], dim=1)
    return SampleResult(
        images_BCHW if order is None else images_BCHW[order],
        routing_SBK if order is None else routing_SBK[:, order],
        sum(part.num_expert_rows for part in parts),
        sum(part.num_router_rows for part in parts),
        parts[0].clusters,
    )
