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
    """Rows of one (micro-)batch with all that is random about them already drawn."""

    data_BCHW: Tensor
    noise_BCHW: Tensor
    t_B: Tensor  # in [0, 1], 0 is data
    condition: Condition | TextIds  # the null one where it was dropped
    cluster_B: Tensor
    kept_BM: Tensor | None = None  # int64, tokens trained on, row-major numbers, ascending; none: all
    teacher_BCHW: Tensor | None = None  # a student's teacher's prediction at x_t

    @property
    def encoded(self) -> Condition:
        """The condition, whose texts are encoded by now."""
        assert not isinstance(self.condition, TextIds)
        return self.condition

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on this device; nobody waits for one in pinned memory, which is on its way."""
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device, non_blocking=True) for name, value in vars(self).items()
        }
        return Batch(**moved)

    def pin_memory(self) -> "Batch":
        """The batch in memory that a GPU copies from by itself."""
        pinned: dict[str, Any] = {
            name: None if value is None else value.pin_memory() for name, value in vars(self).items()
        }
        return Batch(**pinned)


Objective = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class ExpertLoss:
    """Mean squared error of the flow's own prediction, per row: its minimiser is the target's mean given x_t.

    On linear velocity conditional flow matching (paper, eq. 3). A score's is weighted by sigma^2, finite at t = 0:
    (sigma output + noise)^2 (Song et al. 2021). Of a batch that keeps some tokens, the mean is over their pixels,
    and the model is a DiT with patches of `patch_size` (MaskDiT's first loss, arXiv 2306.09305).
    """

    flow: Flow
    patch_size: int | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._mean(self._data_error(self._output(model, batch), batch), batch)

    def _output(self, model: nn.Module, batch: Batch) -> Tensor:
        kept = () if batch.kept_BM is None else (batch.kept_BM,)
        x_BCHW = interpolate(batch.data_BCHW, batch.noise_BCHW, batch.t_B, self.flow.path)
        # Networks answer in the precision of their weights; the loss is taken in the data's.
        return model(x_BCHW, batch.t_B, batch.encoded, *kept).to(batch.data_BCHW.dtype)  # type: ignore[no-any-return]

    def _data_error(self, output: Tensor, batch: Batch) -> Tensor:
        if self.flow.prediction == "score":
            return self._sigma(batch) * output + batch.noise_BCHW
        return output - target(self.flow, batch.data_BCHW, batch.noise_BCHW, batch.t_B)

    def _sigma(self, batch: Batch) -> Tensor:
        return PATHS[self.flow.path].sigma(append_dims(batch.t_B.to(batch.data_BCHW.dtype), batch.data_BCHW))

    def _mean(self, error: Tensor, batch: Batch) -> Tensor:
        """Mean square a row, over the pixels that count."""
        if batch.kept_BM is not None:
            assert self.patch_size is not None
            error = patches(error, self.patch_size, batch.kept_BM)
        return error.square().flatten(1).mean(1)


@dataclass(frozen=True)
class DistillLoss(ExpertLoss):
    """Mean squared error of the student's prediction against its teacher's, weighed as an expert's, per row.

    With a teacher by the datum's own cluster the minimiser is E[u_k(x_t) | x_t] = u(x_t), the mixture (paper, section
    3.4). The share `data_weight` of the loss is that of the data itself.
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
    """Of each row's `num_tokens` tokens, `num_kept` are trained on."""

    num_tokens: int
    num_kept: int

    @classmethod
    def of(cls, num_tokens: int, mask_ratio: float) -> "Masking":
        """The share 1 - mask_ratio of the tokens is kept, rounded half up, and one at least."""
        # In decimals, as it was asked for: .9 leaves 1.5 of 15 tokens, and not 1.4999999999999998.
        kept = (1 - Fraction(str(mask_ratio))) * num_tokens
        return cls(num_tokens, max(math.floor(kept + Fraction(1, 2)), 1))


@dataclass(frozen=True)
class Draws:
    """Noise, times, condition dropout and, with a mask, the kept tokens of one whole global batch; its rows' views."""

    noise_BCHW: Tensor
    t_B: Tensor
    drop_B: Tensor
    kept_BM: Tensor | None = None
    views: Views | None = None


def draw(
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
    """The draws of global step `step` of the job `key`: a function of these alone, whatever the world size.

    Every set of kept tokens is as likely; with a mask or without, the other draws are the same.
    """
    numbers = stream(seed, BATCH, *key, step)
    return Draws(
        noise_BCHW=torch.from_numpy(numbers.standard_normal((batch, *shape), np.float32)),
        t_B=times.times(numbers.random(batch, np.float32), path),
        drop_B=torch.from_numpy(numbers.random(batch) < condition_dropout),
        kept_BM=None if masking is None else _kept(numbers, batch, masking),
    )


def _kept(numbers: np.random.Generator, batch: int, masking: Masking) -> Tensor:
    """Tokens of the least of a row's uniforms."""
    order_BN = numbers.random((batch, masking.num_tokens)).argpartition(masking.num_kept - 1, axis=1)
    return torch.from_numpy(np.sort(order_BN[:, : masking.num_kept], axis=1))
