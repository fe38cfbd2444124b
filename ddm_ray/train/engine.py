"""Engine: DeepSpeed ZeRO around one model, with an optimizer, clipping and an EMA kept in the same shards."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from ddm_ray.config import TrainConfig
from ddm_ray.config.optimizers import OPTIMIZERS
from ddm_ray.errors import ConfigError
from ddm_ray.models.adapters import trained_parameters
from ddm_ray.models.compiled import call_uncompiled, compile_blocks, require_compiler
from ddm_ray.models.flops import num_parameters
from ddm_ray.models.network import checkpoint_activations
from ddm_ray.placement import TrainPlacement
from ddm_ray.ray_internals import FORWARD_STACK
from ddm_ray.train.deepspeed_setup import load_deepspeed
from ddm_ray.train.job import own_buffers
from ddm_ray.train.objectives import Batch, Objective
from ddm_ray.train.optimizer import ShardOptimizer
from ddm_ray.train.zero_shards import Shards, reduce_nothing

BUCKET = 500_000_000


def own_device() -> torch.device:
    """The device that an engine of this process computes on."""
    return torch.device(load_deepspeed().accelerator.get_accelerator().current_device_name())


def compiles_unasked(placement: TrainPlacement) -> bool:
    """True on a GPU if the placement leaves the choice; the same on all ranks of a training."""
    return placement.compile is None and placement.zero_stage < 3 and own_device().type == "cuda"


class Engine:
    """Optimises `model` on the torch.distributed world of this process.

    A global step is any number of `backward`, then `step`. Gradients are averaged over ranks. `compiled_unasked`: the
    placement left the choice, so that network code which can't be compiled doesn't end the training. ConfigError for
    ZeRO stage 0 in bf16, which keeps no fp32 shards.
    """

    def __init__(self, model: nn.Module, train: TrainConfig, placement: TrainPlacement):
        self.train = train
        stage = placement.zero_stage
        if stage == 0 and train.precision != "fp32":
            raise ConfigError(
                f"zero_stage 0 is for precision fp32, this run's is {train.precision}: set zero_stage to 1"
            )
        self.compiled_unasked = compiles_unasked(placement)
        compiled = bool(placement.compile) or self.compiled_unasked
        self._optimizer: ShardOptimizer = resolve_name(OPTIMIZERS[train.optimizer])(
            trained_parameters(model).values(),
            train,
            # Cheaper than DeepSpeed, which takes the norm tensor by tensor; stage 3 steps group by group.
            clip_norm=train.clip_norm if stage < 3 else 0.0,
            sharded=stage > 0,
            # Only of flat shards: at stage 0 each parameter would need code of its own.
            compiled=compiled and stage > 0,
        )
        # Kept here, since DeepSpeed's copies would be in bf16.
        self.buffers = own_buffers(model)
        if placement.activation_checkpointing:
            checkpoint_activations(model)
        if placement.compile:
            require_compiler()
        if compiled:
            compile_blocks(model)
        self._deepspeed, *_ = load_deepspeed().initialize(
            model=model,
            optimizer=self._optimizer,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "train_batch_size": torch.distributed.get_world_size(),
                # The caller decides how many micro-batches a step has: running out of memory may change it.
                "managed_gradient_accumulation": False,
                "gradient_clipping": train.clip_norm if stage == 3 else 0.0,
                "bf16": {"enabled": train.precision == "bf16", "check_grad_overflow": stage == 3},
                "zero_optimization": {
                    "stage": stage,
                    # DeepSpeed allocates buffers of this many elements even if the model has fewer.
                    "reduce_bucket_size": min(BUCKET, num_parameters(model)),
                    # Stage 1 reduces after the last backward: copying gradients one by one before gains nothing.
                    "contiguous_gradients": stage > 1,
                    # Compiled code reads 16 bytes at once, and parameters lie one after the other in a flat tensor.
                    "parameter_alignment": compiled,
                    "compute_grad_norm": stage in (0, 3),
                },
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
                # Its timer would wait for the device at every pass and step, for a number that is never read.
                "timers": {"throughput": {"enabled": False}},
            },
        )
        if torch.distributed.get_world_size() == 1:
            reduce_nothing(self._deepspeed)
        # DeepSpeed's wrapper, not the module in it: ZeRO counts micro-batches by its own forward passes.
        self.model: nn.Module = self._deepspeed
        self.device: torch.device = self._deepspeed.device
        self.shards = Shards(self._deepspeed, self._optimizer)
        self._optimizer.materialise(self.shards.partitions)

    def close(self) -> None:
        """Let go of the model, its gradients and the optimizer, which DeepSpeed's hooks would hold for ever."""
        self._deepspeed.destroy()
        stack = FORWARD_STACK.get()
        stack[:] = [module for module in stack if module is not self._deepspeed.module]

    @contextmanager
    def computing_with_ema(self) -> Iterator[nn.Module]:
        """The model with the EMA as its parameters, in the precision that it trains in; afterwards exactly as before.

        Every rank must enter and leave it. After an error within it the engine is of no use any more.
        """
        model: nn.Module = self._deepspeed.module  # the wrapper's forward would prepare a backward pass
        self.shards.swap_ema()
        model.eval()
        yield model
        model.train()
        self.shards.swap_ema()

    def make_code(self, objective: Objective, batch: Batch) -> None:
        """Compile code for a micro-batch, by passes that change nothing and wait for no rank: one may fail alone."""
        # The gradient of the data alone: ZeRO isn't called, which would reduce gradients of parameters.
        data_BCHW = batch.data_BCHW.detach().requires_grad_()
        loss = objective(self._deepspeed.module, replace(batch, data_BCHW=data_BCHW)).sum()
        torch.autograd.grad(loss, data_BCHW)

    def go_uncompiled(self) -> None:
        """Compute without compiled code from now on."""
        call_uncompiled(self._deepspeed.module)
        self._optimizer.go_uncompiled()

    def set_adam_step(self, step: int) -> None:
        """Set the number of steps that the optimizer's bias correction counts from."""
        for state in self._optimizer.state.values():
            state["step"].fill_(step)

    def accumulate(self, objective: Objective, batches: Iterable[tuple[Batch, Tensor]]) -> Tensor:
        """Add the gradients of micro-batches, each with the weight_B of its losses; the weighted sum of the losses."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch, weight_B in batches:
            part = (objective(self.model, batch) * weight_B).sum()
            self.backward(part)
            total += part.detach()
        return total

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` (a scalar; this rank's part of a micro-batch)."""
        self._deepspeed.backward(loss, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> Tensor:
        """Clip and take one step; the gradient's norm over all ranks, a scalar, infinite if it isn't finite."""
        self.shards.settle()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._deepspeed.step()
        if self._deepspeed.zero_optimization_stage() < 3:
            return self._optimizer.norm
        # If a gradient isn't finite ZeRO skips the step, and leaves the norm as it was.
        norm = math.inf if self._deepspeed.optimizer.overflow else self._deepspeed.get_global_grad_norm()
        norm = torch.as_tensor(norm, dtype=torch.float64)
        return torch.where(norm.isfinite(), norm, torch.inf)
