"""Held-out flow-matching loss of monolith and mixture, sparse or not, on the same noise and times.

Shapes: N rows, B rows of a chunk, CHW image, K experts, T bins of t.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddm_ray.core.flow import interpolate, velocity
from ddm_ray.core.mixture import posterior
from ddm_ray.core.routing import Full, TopK
from ddm_ray.data.loader import Rows
from ddm_ray.sampling.checkpoint import Models

CHUNK = 256
BINS = 10


@dataclass(frozen=True)
class Loss:
    """Mean squared error of the velocity per pixel, its standard error over rows, and it by tenths of t."""

    model: str
    loss: float
    std_error: float
    by_t: list[float]


@torch.inference_mode()
def heldout_losses(mixture: Models, monolith: Models, heldout: Rows, seed: int, times_per_row: int = 16) -> list[Loss]:
    """Losses of monolith, full, top-1, top-2 and `own cluster` (each row by its cluster's expert: no router).

    Every row is noised `times_per_row` times, at one t from each equal part of [0, 1]; conditions are given.
    """
    random = torch.Generator().manual_seed(seed)
    num_rows = len(heldout)
    strata = torch.arange(times_per_row).repeat_interleave(num_rows)
    t_all = (strata + torch.rand(len(strata), generator=random)) / times_per_row
    noise_all = torch.randn(len(strata), *heldout.data_NCHW.shape[1:], generator=random)
    errors: dict[str, list[Tensor]] = {}
    for chunk_B in torch.arange(len(strata)).split(CHUNK):
        rows_B = chunk_B % num_rows
        rows = (heldout.data_NCHW[rows_B], heldout.label_N[rows_B], heldout.cluster_N[rows_B])
        batch = (*rows, noise_all[chunk_B], t_all[chunk_B])
        for model, error_B in _errors(mixture, monolith, *batch).items():
            errors.setdefault(model, []).append(error_B)
    bin_all = (t_all * BINS).long().clamp(max=BINS - 1)
    return [_summary(model, torch.cat(parts).double(), bin_all, num_rows) for model, parts in errors.items()]


def _errors(
    mixture: Models,
    monolith: Models,
    data_BCHW: Tensor,
    label_B: Tensor,
    cluster_B: Tensor,
    noise_BCHW: Tensor,
    t_B: Tensor,
) -> dict[str, Tensor]:
    device, num_experts = mixture.device, mixture.info.num_experts
    assert mixture.router is not None
    x_BCHW, t, label = interpolate(data_BCHW, noise_BCHW, t_B).to(device), t_B.to(device), label_B.to(device)
    velocities = {"monolith": monolith.experts[0](x_BCHW, t, label).cpu()}
    velocity_BKCHW = torch.stack([expert(x_BCHW, t, label).cpu() for expert in mixture.experts], dim=1)
    posterior_BK = posterior(mixture.router(x_BCHW, t, label).cpu())
    for strategy in (Full(), TopK(1), TopK(2)):
        if isinstance(strategy, Full) or strategy.kept < num_experts:
            routing = strategy.route(posterior_BK)
            weights_BK = torch.zeros_like(posterior_BK).scatter_add_(1, routing.experts_Bk, routing.weights_Bk)
            velocities[strategy.name] = torch.einsum("bk,bkchw->bchw", weights_BK, velocity_BKCHW)
    velocities["own cluster"] = velocity_BKCHW[torch.arange(len(t_B)), cluster_B.long()]
    target_BCHW = velocity(data_BCHW, noise_BCHW)
    return {name: (found - target_BCHW).square().flatten(1).mean(1) for name, found in velocities.items()}


def _summary(model: str, error: Tensor, bin_all: Tensor, num_rows: int) -> Loss:
    by_t = torch.bincount(bin_all, error, BINS) / torch.bincount(bin_all, minlength=BINS).clamp(min=1)
    row_means_N = error.view(-1, num_rows).mean(0)
    std_error = (row_means_N.var(correction=min(1, num_rows - 1)) / num_rows).sqrt()
    return Loss(model, float(error.mean()), float(std_error), by_t.tolist())
