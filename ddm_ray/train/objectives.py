"""Objectives: (model, batch) -> a loss per row. Shapes: B rows, C channels, H x W pixels, K clusters."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm_ray.core.flow import interpolate, velocity
from ddm_ray.core.streams import BATCH, stream


@dataclass(frozen=True)
class Batch:
    """Rows of one (micro-)batch with all that is random about them already drawn."""

    data_BCHW: Tensor
    noise_BCHW: Tensor
    t_B: Tensor  # in [0, 1), 0 is data
    label_B: Tensor  # num_classes where the condition was dropped
    cluster_B: Tensor


Objective = Callable[[nn.Module, Batch], Tensor]


def expert_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Conditional flow matching: mean squared error of the velocity, per row (paper, eq. 3)."""
    x_BCHW = interpolate(batch.data_BCHW, batch.noise_BCHW, batch.t_B)
    target_BCHW = velocity(batch.data_BCHW, batch.noise_BCHW)
    return (model(x_BCHW, batch.t_B, batch.label_B).float() - target_BCHW).square().flatten(1).mean(1)


def router_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the row's cluster given (x_t, t, condition), per row (paper, section 3.3)."""
    x_BCHW = interpolate(batch.data_BCHW, batch.noise_BCHW, batch.t_B)
    return F.cross_entropy(model(x_BCHW, batch.t_B, batch.label_B).float(), batch.cluster_B, reduction="none")


@dataclass(frozen=True)
class Draws:
    """Noise, times and condition dropout of one whole global batch."""

    noise_BCHW: Tensor
    t_B: Tensor
    drop_B: Tensor


def draw(
    seed: int, key: tuple[int, ...], step: int, batch: int, shape: tuple[int, int, int], condition_dropout: float
) -> Draws:
    """The draws of global step `step` of the job `key`: a function of these alone, whatever the world size."""
    numbers = stream(seed, BATCH, *key, step)
    return Draws(
        noise_BCHW=torch.from_numpy(numbers.standard_normal((batch, *shape), np.float32)),
        t_B=torch.from_numpy(numbers.random(batch, np.float32)),
        drop_B=torch.from_numpy(numbers.random(batch) < condition_dropout),
    )
