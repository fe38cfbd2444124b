"""Engine: DeepSpeed ZeRO around one model, with torch's AdamW, clipping and an EMA kept in optimizer shards."""

import logging
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ddm_ray.config import TrainConfig
from ddm_ray.placement import Placement

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed import utils as shards

# DeepSpeed would compile this optional CPU communicator for a minute at the first use; gloo does without.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
shards.logger.setLevel(logging.ERROR)

VALUE = "value"
RECORDS = (VALUE, "exp_avg", "exp_avg_sq", "ema")


class AdamWithEMA(torch.optim.AdamW):
    """torch's AdamW that also keeps `ema <- decay ema + (1 - decay) parameter`, starting at the initial value.

    DeepSpeed hands it fp32 shards of the parameters, so the EMA is sharded as they are.
    """

    def __init__(self, params: Iterator[nn.Parameter], *, ema_decay: float, **adamw: float | tuple[float, float]):
        super().__init__(params, **adamw)  # type: ignore[arg-type]
        self.ema_decay = ema_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One AdamW step on every parameter that has a gradient, then one of its EMA."""
        shards = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        first = {id(p): p.detach().clone() for p in shards if "ema" not in self.state.get(p, {})}
        super().step(closure)
        for p in shards:
            if id(p) in first:
                self.state[p]["ema"] = first[id(p)]
            self.state[p]["ema"].lerp_(p, 1.0 - self.ema_decay)


class Engine:
    """Optimises `model` on the torch.distributed world it finds itself in.

    A global step is `accumulation` calls of `backward`, then `step`. Gradients are averaged over ranks.
    """

    def __init__(self, model: nn.Module, train: TrainConfig, placement: Placement, accumulation: int):
        self.train = train
        self.accumulation = accumulation
        self._optimizer = AdamWithEMA(
            model.parameters(),
            ema_decay=train.ema_decay,
            lr=0.0,
            betas=train.betas,
            weight_decay=train.weight_decay,
        )
        world = torch.distributed.get_world_size()
        self._deepspeed, *_ = deepspeed.initialize(
            model=model,
            optimizer=self._optimizer,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": accumulation,
                "train_batch_size": world * accumulation,
                "gradient_clipping": train.clip_norm,
                "bf16": {"enabled": train.precision == "bf16"},
                "zero_optimization": {"stage": placement.zero_stage},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
            },
        )
        self.model: nn.Module = self._deepspeed.module
        self.device: torch.device = self._deepspeed.device
        self._materialise()

    def _materialise(self) -> None:
        # Moments and EMA exist only after a first step: take one that changes nothing, then uncount it.
        for _ in range(self.accumulation):
            self.backward(sum((p * 0.0).sum() for p in self.model.parameters()))  # type: ignore[arg-type]
        self._deepspeed.step()
        self.set_adam_step(0)

    def set_adam_step(self, step: int) -> None:
        """Set the number of steps that AdamW's bias correction counts from."""
        for state in self._optimizer.state.values():
            state["step"].fill_(step)

    def autocast(self) -> torch.autocast:
        """Context in which the model computes in the run's precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.train.precision == "bf16")

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` (a scalar; this rank's part of a micro-batch)."""
        # DeepSpeed divides by the number of micro-batches; our losses are sums with the weights already right.
        self._deepspeed.backward(loss * self.accumulation)
        if not self._deepspeed.is_gradient_accumulation_boundary():
            self._deepspeed.step()

    def step(self, step: int) -> float:
        """Clip, take AdamW's step number `step` (from 0) at its warm-up's learning rate; the gradient's norm."""
        warmup = min(1.0, (step + 1) / self.train.warmup_steps) if self.train.warmup_steps else 1.0
        for group in self._optimizer.param_groups:
            group["lr"] = self.train.learning_rate * warmup
        self._deepspeed.step()
        return float(self._deepspeed.get_global_grad_norm())

    def full(self, parameter: nn.Parameter, record: str) -> Tensor:
        """One of RECORDS of a parameter, fp32 and whole, gathered from all ranks' shards: every rank must ask."""
        if record == VALUE:
            return shards.safe_get_full_fp32_param(parameter).detach()
        return shards.safe_get_full_optimizer_state(parameter, record).detach()

    def set_full(self, parameter: nn.Parameter, record: str, tensor: Tensor) -> None:
        """Set one of RECORDS in this rank's shard from the whole tensor. The model's own copy is not touched."""
        if record == VALUE:
            shards.safe_set_full_fp32_param(parameter, tensor.to(self.device))
        else:
            shards.safe_set_full_optimizer_state(parameter, tensor.to(self.device), record)
