"""Base of all optimizers of shards. A kind of optimizer is a subclass, and a line of config.OPTIMIZERS.

No optimizer makes the host wait for its device.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ddm_ray.config import TrainConfig
from ddm_ray.train.zero_shards import EMA

# Elements of which one fp32 sum of squares is taken.
NORM_CHUNK_CPU, NORM_CHUNK_GPU = 2**16, 2**24
Moments = tuple[Tensor, ...]
Scalars = tuple[Tensor, ...]
Betas = tuple[float, float]


class ShardOptimizer(torch.optim.Optimizer, ABC):
    """Optimizer of fp32 shards of parameters, as DeepSpeed passes them. The EMA is sharded in the same way.

    A kind of optimizer names its `moments`. Each is a tensor of the parameter's shape, which is saved and resumed at
    any number of workers. `scalars` and `updated` define a step. `clip_norm` > 0 clips the gradients that this
    optimizer holds, or (`sharded`) those of all ranks; no step is taken if a gradient isn't finite. `norm` is their
    norm before clipping, a float64 scalar on their device, infinite if it isn't finite. With `compiled` a shard's
    update reads and writes memory only once.
    """

    moments: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        train: TrainConfig,
        *,
        clip_norm: float = 0.0,
        sharded: bool = False,
        compiled: bool = False,
    ):
        super().__init__(params, {"lr": 0.0, "betas": train.betas, "weight_decay": train.weight_decay})
        self.ema_decay, self.clip_norm, self._sharded = train.ema_decay, clip_norm, sharded
        step_and_ema = partial(update, self.updated, train.betas)
        self._compiled_update = torch.compile(step_and_ema, dynamic=False) if compiled else None
        self.norm = torch.zeros((), dtype=torch.float64)

    @abstractmethod
    def scalars(self, group: dict[str, Any], step: Tensor) -> Scalars:
        """Scalars of this step, counted from 1, as tensors on its device. Numbers would be compiled again."""

    @staticmethod
    @abstractmethod
    def updated(value: Tensor, gradient: Tensor, moments: Moments, scalars: Scalars, betas: Betas) -> Moments:
        """The value, and its moments, after a step; the arguments don't change. Written to be compiled."""

    @torch.no_grad()
    def materialise(self, shards: Iterable[Tensor]) -> None:
        """Make the state before the first step: the moments are zero, the EMA is the value."""
        for shard in shards:
            self.state[shard] = {"step": torch.zeros((), device=shard.device), EMA: shard.detach().clone()}
            self.state[shard] |= {moment: torch.zeros_like(shard, requires_grad=False) for moment in self.moments}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step on every shard that has a gradient, and one of its EMA; no step if the norm isn't finite."""
        shards = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.materialise(shard for shard in shards if shard not in self.state)
        factor = finite = None
        if self.clip_norm:
            norm = self._norm([shard.grad for shard in shards])
            finite = norm.isfinite()
            self.norm = torch.where(finite, norm, torch.inf)
            # In the gradients' own precision: by another they are multiplied one by one.
            factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0).float()
        for group in self.param_groups:
            shards = [shard for shard in group["params"] if shard.grad is not None]
            if self._compiled_update is not None and finite is not None:
                self._update(group, self._compiled_update, factor, finite)
                continue
            if factor is not None:
                torch._foreach_mul_([shard.grad for shard in shards], factor)
            self.step_group(group, shards, finite)
            self._follow(shards, finite)

    def step_group(self, group: dict[str, Any], shards: list[Any], finite: Tensor | None) -> None:
        """One step of a group's shards by their gradients, where `finite`; a kind may know a faster way."""
        for shard in shards:
            state = self.state[shard]
            state["step"] += 1 if finite is None else finite
            held = shard, *(state[moment] for moment in self.moments)
            changed = self.updated(shard, shard.grad, held[1:], self.scalars(group, state["step"]), group["betas"])
            for old, new in zip(held, changed, strict=True):
                old.copy_(new if finite is None else torch.where(finite, new, old))

    def go_uncompiled(self) -> None:
        """Update without compiled code from here on."""
        self._compiled_update = None

    def _follow(self, shards: list[Any], finite: Tensor | None) -> None:
        """One step of the EMA: `ema <- (1 - weight) ema + weight parameter`, with the weight of `ema_weight`."""
        for shard in shards:
            state = self.state[shard]
            weight = ema_weight(state["step"], self.ema_decay, shard.dtype)
            state[EMA].lerp_(shard, weight if finite is None else finite * weight)

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """Norm in float64 of all gradients that this rank holds, or (`sharded`) that all ranks hold."""
        # In chunks: over millions of elements one sum in fp32 is off by a thousandth on a CPU; a GPU sums as a tree.
        size = NORM_CHUNK_GPU if gradients[0].is_cuda else NORM_CHUNK_CPU
        chunks = [chunk for gradient in gradients for chunk in gradient.view(-1).split(size)]
        square = torch.stack(torch._foreach_norm(chunks)).double().square().sum()
        if self._sharded:
            torch.distributed.all_reduce(square)
        return square.sqrt()

    def _update(self, group: dict[str, Any], compiled: Any, factor: Tensor | None, finite: Tensor) -> None:
        """One step of a group by the compiled update."""
        for shard in group["params"]:
            state = self.state[shard]
            state["step"] += finite
            moments = tuple(state[moment] for moment in self.moments)
            weight = ema_weight(state["step"], self.ema_decay, shard.dtype)
            compiled(shard, shard.grad, moments, state[EMA], factor, finite, weight, self.scalars(group, state["step"]))


def ema_weight(step: Tensor, decay: float, dtype: torch.dtype) -> Tensor:
    """Weight of the newest parameters in the EMA after step `step`, from 1: 1 - decay, or at first 9/(10 + step).

    So the random weights of the beginning leave the average within a few dozen steps. With the weight 1 - 0.9999 alone
    they would be most of it for 7,000 steps.
    """
    return (9.0 / (10.0 + step.double())).clamp(min=1.0 - decay).to(dtype)


def update(
    updated: Callable[..., Moments],
    betas: Betas,
    value: Tensor,
    gradient: Tensor,
    moments: Moments,
    ema: Tensor,
    factor: Tensor,
    finite: Tensor,
    weight: Tensor,
    scalars: Scalars,
) -> None:
    """A step and the EMA of its value, with this `weight`, in place, where `finite`; made to be compiled.

    Compiled it is one kernel: for AdamW it reads 20 bytes of each parameter and writes 16. The gradient counts times
    `factor`.
    """
    new_value, *new_moments = updated(value, gradient * factor, moments, scalars, betas)
    new_ema = torch.lerp(ema, new_value, weight)
    for old, new in zip((value, *moments, ema), (new_value, *new_moments, new_ema), strict=True):
        old.copy_(torch.where(finite, new, old))
