"""Objectives: (model, batch) -> a loss per row.

Shapes: B rows, C channels, H x W pixels, K clusters, N tokens of an image, M of them kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm_ray.core.augmentation import Views
from ddm_ray.core.condition import Condition, TextIds
from ddm_ray.core.flow import PATHS, Flow, append_dims, interpolate, target
from ddm_ray.core.streams import BATCH, stream
from ddm_ray.core.times import TimeSampling
from ddm_ray.models.dit import patches


@dataclass(frozen=True)
class Batch:
    """Rows of one (micro-)batch, with all their random numbers."""

    data_BCHW: Tensor
    noise_BCHW: Tensor
    t_B: Tensor  # in [0, 1], 0 is data
    condition: Condition | TextIds  # the null condition for rows that dropped theirs
    cluster_B: Tensor
    kept_BM: Tensor | None = None  # int64, row-major numbers of the tokens trained on, ascending; None: all
    teacher_BCHW: Tensor | None = None  # the prediction of a student's teacher at x_t

    @property
    def encoded(self) -> Condition:
        """The condition; its texts have to be encoded by now."""
        assert not isinstance(self.condition, TextIds)
        return self.condition

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on this device. From pinned memory it is copied while the host goes on."""
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device, non_blocking=True) for name, value in vars(self).items()
        }
        return Batch(**moved)

    def pin_memory(self) -> "Batch":
        """The batch in pinned memory, from which a GPU copies by itself."""
        pinned: dict[str, Any] = {
            name: None if value is None else value.pin_memory() for name, value in vars(self).items()
        }
        return Batch(**pinned)


Objective = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class ExpertLoss:
    """Mean squared error of the flow's prediction, per row: its minimiser is the target's mean given x_t.

    For velocities on the linear path it is conditional flow matching (paper, eq. 3). For scores it is weighted by
    sigma^2, which makes it finite at t = 0: (sigma output + noise)^2 (Song et al. 2021). If a batch keeps only some
    tokens, the mean is over their pixels, and the model is a DiT with patches of `patch_size` (MaskDiT's first loss,
    arXiv 2306.09305).
    """

    flow: Flow
    patch_size: int | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._mean(self._data_error(self._output(model, batch), batch), batch)

    def _output(self, model: nn.Module, batch: Batch) -> Tensor:
        kept = () if batch.kept_BM is None else (batch.kept_BM,)
        x_BCHW = interpolate(batch.data_BCHW, batch.noise_BCHW, batch.t_B, self.flow.path)
        # Networks compute in the precision of their weights, the loss is computed in the data's.
        return model(x_BCHW, batch.t_B, batch.encoded, *kept).to(batch.data_BCHW.dtype)  # type: ignore[no-any-return]

    def _data_error(self, output: Tensor, batch: Batch) -> Tensor:
        if self.flow.prediction == "score":
            return self._sigma(batch) * output + batch.noise_BCHW
        return output - target(self.flow, batch.data_BCHW, batch.noise_BCHW, batch.t_B)

    def _sigma(self, batch: Batch) -> Tensor:
        return PATHS[self.flow.path].sigma(append_dims(batch.t_B.to(batch.data_BCHW.dtype), batch.data_BCHW))

    def _mean(self, error: Tensor, batch: Batch) -> Tensor:
        """Mean square per row, over the pixels of kept tokens."""
        if batch.kept_BM is not None:
            assert self.patch_size is not None
            error = patches(error, self.patch_size, batch.kept_BM)
        return error.square().flatten(1).mean(1)


@dataclass(frozen=True)
class DistillLoss(ExpertLoss):
    """Mean squared error of the student's prediction against its teacher's, weighted as an expert's, per row.

    If each row's teacher is the expert of its cluster, the minimiser is E[u_k(x_t) | x_t] = u(x_t), the mixture (paper,
    section 3.4). The share `data_weight` of the loss is the expert's loss, on the data itself.
    """

    data_weight: float = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        assert batch.teacher_BCHW is not None
        output = self._output(model, batch)
        error = output - batch.teacher_BCHW
        if self.flow.prediction == "score":
            error = self._sigma(batch) * error
        loss_B = self._mean(error, batch)
        if not self.data_weight:
            return loss_B
        return torch.lerp(loss_B, self._mean(self._data_error(output, batch), batch), self.data_weight)


@dataclass(frozen=True)
class RouterLoss:
    """Cross-entropy of the row's cluster given (x_t, t, condition) on the flow's path, per row (paper, 3.3)."""

    flow: Flow

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        x_BCHW = interpolate(batch.data_BCHW, batch.noise_BCHW, batch.t_B, self.flow.path)
        logits_BK = model(x_BCHW, batch.t_B, batch.encoded).to(batch.data_BCHW.dtype)
        return F.cross_entropy(logits_BK, batch.cluster_B, reduction="none")


@dataclass(frozen=True)
class Masking:
    """Training on `num_kept` of each row's `num_tokens` tokens."""

    num_tokens: int
    num_kept: int

    @classmethod
    def of(cls, num_tokens: int, mask_ratio: float) -> "Masking":
        """Keep the share 1 - mask_ratio of the tokens, rounded half up, and at least one."""
        # Exact in decimals: .9 leaves 1.5 of 15 tokens, which binary numbers make 1.4999999999999998.
        kept = (1 - Fraction(str(mask_ratio))) * num_tokens
        return cls(num_tokens, max(math.floor(kept + Fraction(1, 2)), 1))


@dataclass(frozen=True)
class Draws:
    """Random numbers of a whole global batch: noise, times, condition dropout, kept tokens with a mask, rows' views."""

    noise_BCHW: Tensor
    t_B: Tensor
    drop_B: Tensor
    kept_BM: Tensor | None = None
    views: Views | None = None


def draw_batch(
    seed: int,
    key: tuple[int, ...],
    step: int,
    batch: int,
    shape: tuple[int, int, int],
    condition_dropout: float,
    times: TimeSampling,
    path: str,
    masking: Masking | None = None,
) -> Draws:
    """The draws of global step `step` of the job `key`: they depend on the arguments alone, not on the world size.

    All sets of kept tokens are equally likely. The other draws are the same with a mask and without.
    """
    numbers = stream(seed, BATCH, *key, step)
    return Draws(
        noise_BCHW=torch.from_numpy(numbers.standard_normal((batch, *shape), np.float32)),
        t_B=times.times(numbers.random(batch, np.float32), path),
        drop_B=torch.from_numpy(numbers.random(batch) < condition_dropout),
        kept_BM=None if masking is None else _kept(numbers, batch, masking),
    )


def _kept(numbers: np.random.Generator, batch: int, masking: Masking) -> Tensor:
    """The tokens that have the smallest of a row's uniform numbers."""
    order_BN = numbers.random((batch, masking.num_tokens)).argpartition(masking.num_kept - 1, axis=1)
    return torch.from_numpy(np.sort(order_BN[:, : masking.num_kept], axis=1))
