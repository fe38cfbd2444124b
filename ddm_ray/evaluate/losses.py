"""Held-out flow-matching loss of dense models, and of the mixture by strategy, on the same noise and times.

Shapes: N rows, B rows of a chunk, CHW image, K experts, T bins of t.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddm_ray.core.calibration import tempered
from ddm_ray.core.condition import Condition
from ddm_ray.core.flow import interpolate, velocity
from ddm_ray.core.mixture import posterior
from ddm_ray.core.routing import Sticky, Strategy, parse_strategy
from ddm_ray.data.loading.loader import Rows
from ddm_ray.sampling.driver import Field
from ddm_ray.sampling.run_models import Models

CHUNK = 256
BINS = 10


@dataclass(frozen=True)
class Loss:
    """Mean squared error of the velocity per pixel, its standard error over rows, and the error per tenth of t."""

    model: str
    loss: float
    std_error: float
    by_t: list[float]


@dataclass(frozen=True)
class Noised:
    """Each held-out row `times_per_row` times on the linear path, at one t from each equal part of [0, 1]."""

    condition_N: Condition
    rows_B: Tensor
    x_BCHW: Tensor
    target_BCHW: Tensor
    t_B: Tensor

    @classmethod
    def of(cls, heldout: Rows, seed: int, times_per_row: int) -> "Noised":
        random = torch.Generator().manual_seed(seed)
        strata_B = torch.arange(times_per_row).repeat_interleave(len(heldout))
        t_B = (strata_B + torch.rand(len(strata_B), generator=random)) / times_per_row
        noise_BCHW = torch.randn(len(strata_B), *heldout.data_NCHW.shape[1:], generator=random)
        rows_B = torch.arange(len(strata_B)) % len(heldout)
        data_BCHW = heldout.data_NCHW[rows_B]
        target_BCHW = velocity(data_BCHW, noise_BCHW)
        return cls(heldout.condition, rows_B, interpolate(data_BCHW, noise_BCHW, t_B), target_BCHW, t_B)

    def inputs(self, chunk_B: Tensor, device: str) -> tuple[Tensor, Tensor, Condition]:
        """x, t and conditions of a chunk's rows, in the form that networks take."""
        # Repeated only now, chunk by chunk: texts are many times the size of a row's data.
        condition_B = self.condition_N[self.rows_B[chunk_B]]
        return self.x_BCHW[chunk_B].to(device), self.t_B[chunk_B].to(device), condition_B.to(device)


@torch.inference_mode()
def heldout_losses(
    mixture: Models,
    denses: Mapping[str, Models],
    heldout: Rows,
    strategies: Sequence[str],
    seed: int,
    temperature: float = 1.0,
    times_per_row: int = 16,
) -> list[Loss]:
    """Losses of the dense models, of the mixture by strategy, and of `own cluster`: each row by its cluster's expert,
    without a router.

    Strategies without a velocity at (x, t) are left out: those that draw, or keep an expert for longer than a step.
    Without a router, all strategies are. Every row is noised `times_per_row` times, at one t from each equal part
    of [0, 1].
    """
    routed = strategies if mixture.router is not None else ()
    by_name = {name: parse_strategy(name, mixture.info.num_experts) for name in routed}
    memoryless = {name: strategy for name, strategy in by_name.items() if _is_memoryless(strategy)}
    noised = Noised.of(heldout, seed, times_per_row)
    errors: dict[str, list[Tensor]] = {}
    for chunk_B in torch.arange(len(noised.t_B)).split(CHUNK):
        for model, error_B in _errors(mixture, denses, memoryless, temperature, heldout, noised, chunk_B).items():
            errors.setdefault(model, []).append(error_B)
    bin_all = (noised.t_B * BINS).long().clamp(max=BINS - 1)
    return [_summary(model, torch.cat(parts).double(), bin_all, len(heldout)) for model, parts in errors.items()]


def _is_memoryless(strategy: Strategy) -> bool:
    return not strategy.draws and strategy.when != "start" and not isinstance(strategy, Sticky)


def _errors(
    mixture: Models,
    denses: Mapping[str, Models],
    strategies: Mapping[str, Strategy],
    temperature: float,
    heldout: Rows,
    noised: Noised,
    chunk_B: Tensor,
) -> dict[str, Tensor]:
    """Squared error of each model's velocity on a chunk's rows, by the model's name."""
    num_experts = mixture.info.num_experts
    inputs = noised.inputs(chunk_B, mixture.device)

    def answer(network: Field) -> Tensor:
        return network(*inputs).to(noised.x_BCHW)  # networks return bf16 on a GPU

    velocities = {name: answer(_network(dense, 0)) for name, dense in denses.items()}
    velocity_BKCHW = torch.stack([answer(_network(mixture, k)) for k in range(num_experts)], dim=1)
    # Without a router `strategies` is empty, and nothing reads the posterior.
    posterior_BK = posterior(tempered(answer(mixture.router), temperature)) if mixture.router else torch.empty(0)
    for name, strategy in strategies.items():
        weights_BK = strategy.route(posterior_BK, torch.zeros_like(posterior_BK), None)
        velocities[name] = torch.einsum("bk,bkchw->bchw", weights_BK, velocity_BKCHW)
    velocities["own cluster"] = velocity_BKCHW[
        torch.arange(len(chunk_B)), heldout.cluster_N[noised.rows_B[chunk_B]].long()
    ]
    target_BCHW = noised.target_BCHW[chunk_B]
    return {name: (own - target_BCHW).square().flatten(1).mean(1) for name, own in velocities.items()}


def _network(models: Models, expert: int) -> Field:
    field = models.experts[expert]
    assert field is not None
    return field


def _summary(model: str, error: Tensor, bin_all: Tensor, num_rows: int) -> Loss:
    by_t = torch.bincount(bin_all, error, BINS) / torch.bincount(bin_all, minlength=BINS).clamp(min=1)
    row_means_N = error.view(-1, num_rows).mean(0)
    std_error = (row_means_N.var(correction=min(1, num_rows - 1)) / num_rows).sqrt()
    return Loss(model, float(error.mean()), float(std_error), by_t.tolist())
