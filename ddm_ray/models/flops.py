"""How much arithmetic one row costs, counted by torch and not by a formula."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def forward_flops_per_row(model: nn.Module, image_shape: tuple[int, int, int]) -> int:
    """FLOPs (a multiply-add is 2) of `model(x, t, label)` for one row of shape (C, H, W)."""
    return _count(model, image_shape, backward=False)


def training_flops_per_row(model: nn.Module, image_shape: tuple[int, int, int]) -> int:
    """FLOPs (a multiply-add is 2) of one row's forward and backward pass, no activation checkpointing."""
    return _count(model, image_shape, backward=True)


def _count(model: nn.Module, image_shape: tuple[int, int, int], backward: bool) -> int:
    # On the meta device operations are dispatched and counted but nothing is computed, so a model of any size
    # is measured in milliseconds and its gradients stay untouched.
    tensors = {name: _on_meta(tensor) for name, tensor in model.named_parameters()}
    tensors |= {name: _on_meta(tensor) for name, tensor in model.named_buffers()}
    dtype = next(model.parameters()).dtype
    row = (
        torch.zeros(1, *image_shape, dtype=dtype, device="meta"),
        torch.zeros(1, device="meta"),
        torch.zeros(1, dtype=torch.int64, device="meta"),
    )
    # Fused attention kernels are counted unequally by device; the plain one is matrix products everywhere.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = functional_call(model, tensors, row)
        if backward:
            output.sum().backward()
    return counter.get_total_flops()


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
