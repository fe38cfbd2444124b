"""FLOPs of one row, counted by torch and not by a formula, and the memory that a model takes."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddm_ray.models.adapters import trained_parameters
from ddm_ray.models.rows import rows_of_zeros

Shape = tuple[int, int, int]

# Bytes a parameter, all in fp32: what the optimizer keeps, and the gradient that comes and goes.
TRAINING_BYTES = {"value": 4, "exp_avg": 4, "exp_avg_sq": 4, "ema": 4, "gradient": 4}


def num_parameters(model: nn.Module) -> int:
    """Number of trainable parameters, of an adapted network those of its adapter; tables of positions are none."""
    return sum(parameter.numel() for parameter in trained_parameters(model).values())


def num_frozen(model: nn.Module) -> int:
    """Number of parameters of an adapted network's base; 0 for others."""
    return sum(parameter.numel() for parameter in model.parameters()) - num_parameters(model)


def weights_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the parameters in this precision; models are loaded in float32, whatever a file holds."""
    return num_parameters(model) * dtype.itemsize


def training_bytes(model: nn.Module) -> int:
    """Bytes that training keeps for the parameters, over all ranks: TRAINING_BYTES' terms, 20 a parameter.

    Activations come on top, and with ZeRO and bf16 a 2-byte copy of the parameters to compute with.
    """
    return num_parameters(model) * sum(TRAINING_BYTES.values())


def forward_flops_per_row(model: nn.Module, image_shape: Shape, text_tokens: int = 0) -> int:
    """FLOPs of `model(x, t, condition)` for one row of shape (C, H, W), matrix products alone.

    A multiply-add is 2. A text-conditioned model needs the number of its `text_tokens`, padding included.
    """
    return _count(model, image_shape, text_tokens, backward=False)


def training_flops_per_row(
    model: nn.Module, image_shape: Shape, text_tokens: int = 0, num_kept: int | None = None
) -> int:
    """FLOPs of one row's forward and backward pass, counted as `forward_flops_per_row` does, no checkpointing.

    `num_kept`: of a DiT that is given so many of the image's tokens; none: all.
    """
    return _count(model, image_shape, text_tokens, backward=True, num_kept=num_kept)


def _count(model: nn.Module, image_shape: Shape, text_tokens: int, backward: bool, num_kept: int | None = None) -> int:
    # On the meta device operations are dispatched and counted but nothing is computed, so a model of any size
    # is measured in milliseconds and its gradients stay untouched.
    tensors = {name: _on_meta(tensor) for name, tensor in model.named_parameters()}
    tensors |= {name: _on_meta(tensor) for name, tensor in model.named_buffers()}
    dtype = next(model.parameters()).dtype
    with torch.device("meta"):
        row = rows_of_zeros(model, 1, image_shape, text_tokens, num_kept, dtype)
    # Fused attention kernels are counted unequally by device; the plain one is matrix products everywhere.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = functional_call(model, tensors, row)
        if backward:
            output.sum().backward()
    return counter.get_total_flops()


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
