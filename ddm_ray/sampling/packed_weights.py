"""A network's tensors in one block of memory, which is copied at once, and computed with where it lies."""

import copy
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 256
"""Tensors begin at multiples of so many bytes: elsewhere libraries of GPUs choose kernels of other bits."""


@dataclass(frozen=True)
class _Span:
    shape: torch.Size
    dtype: torch.dtype
    begin: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class PackedWeights:
    """Positions of a network's parameters and buffers, each in its own precision, in a block of `num_bytes`."""

    def __init__(self, network: nn.Module):
        self._form = _form(network)
        sizes = [prod(tensor.shape) * tensor.dtype.itemsize for tensor in _tensors(network)]
        *begins, self.num_bytes = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        self._spans = [
            _Span(tensor.shape, tensor.dtype, begin) for tensor, begin in zip(_tensors(network), begins, strict=True)
        ]
        # The first network itself isn't kept: its tensors are large.
        self._skeleton = _copied(network, [torch.empty(0) for _ in self._spans])

    def block(self, network: nn.Module) -> Tensor:
        """A block (uint8) on the CPU that holds the tensors of a network of the same form."""
        block = torch.zeros(self.num_bytes, dtype=torch.uint8)
        with torch.no_grad():
            for tensor, view in zip(_tensors(network), self._views(block), strict=True):
                view.copy_(tensor)
        return block

    def network(self, block: Tensor) -> nn.Module:
        """A network of this form; its tensors are views of a block, and it computes with what is copied there."""
        return _copied(self._skeleton, self._views(block))

    def fits(self, network: nn.Module) -> bool:
        """True for a network of the same form: it differs in the values of its tensors alone."""
        return _form(network) == self._form

    def _views(self, block: Tensor) -> list[Tensor]:
        return [
            block[span.begin : span.begin + span.num_bytes].view(span.dtype).view(span.shape) for span in self._spans
        ]


@dataclass(frozen=True, eq=False)
class Packed:
    """A network's weights in a block of host memory, and the positions of its tensors there."""

    form: PackedWeights
    block: Tensor


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]


def _copied(network: nn.Module, tensors: list[Tensor]) -> nn.Module:
    """A copy of the network with these tensors in place of its own."""
    own = _tensors(network)
    # Whatever is in the memo counts as copied already. Whether a parameter requires gradients decides, even where there
    # are none, by which kernels torch multiplies it.
    memo: dict[int, Any] = {
        id(before): nn.Parameter(tensor, before.requires_grad) if isinstance(before, nn.Parameter) else tensor
        for before, tensor in zip(own, tensors, strict=True)
    }
    return copy.deepcopy(network, memo)


def _form(network: nn.Module) -> list[Any]:
    """Modules by name and class with what they remember, and the tensors' shapes and precisions.

    The base of an adapted network is no part of it: the tensors are there, and it isn't to be kept.
    """
    modules: list[Any] = [
        (name, type(module), {key: value for key, value in vars(module).items() if key[0] != "_" and key != "base"})
        for name, module in network.named_modules()
    ]
    return modules + [(tensor.shape, tensor.dtype) for tensor in _tensors(network)]
