"""A network's tensors in one block of memory, which is copied at once, and computed with where it lies."""

import copy
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 256
"""Bytes on whose multiples tensors begin, as libraries of GPUs like it: elsewhere they choose kernels of other bits."""


@dataclass(frozen=True)
class _Place:
    shape: torch.Size
    dtype: torch.dtype
    begin: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Flat:
    """Places of a network's parameters and buffers in a block of `num_bytes`.

    In float32 each tensor stays what it is. In bfloat16 those are rounded that autocast would round at every call, the
    weights of linear layers and convolutions, and networks run under it: their answers are autocast's to the bit, and
    tables of positions, norms and embeddings lose nothing.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype = torch.float32):
        self.dtype, self._form = dtype, _form(network)
        dtypes = _dtypes(network, dtype)
        sizes = [prod(tensor.shape) * dtypes[id(tensor)].itemsize for tensor in _tensors(network)]
        *begins, self.num_bytes = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        self._places = [
            _Place(tensor.shape, dtypes[id(tensor)], begin)
            for tensor, begin in zip(_tensors(network), begins, strict=True)
        ]
        # The first network itself isn't kept: its tensors are large.
        self._skeleton = _copied(network, [torch.empty(0) for _ in self._places])

    def block(self, network: nn.Module) -> Tensor:
        """A block (uint8) on the CPU that holds the tensors of a network of the same form."""
        block = torch.zeros(self.num_bytes, dtype=torch.uint8)
        with torch.no_grad():
            for tensor, view in zip(_tensors(network), self._views(block), strict=True):
                view.copy_(tensor)
        return block

    def network(self, block: Tensor) -> nn.Module:
        """A network of this form whose tensors are views of a block: it computes with whatever is copied there."""
        network = _copied(self._skeleton, self._views(block))
        if self.dtype == torch.bfloat16:
            network.forward = torch.autocast(block.device.type, torch.bfloat16)(network.forward)  # type: ignore[method-assign]
        return network

    def fits(self, network: nn.Module) -> bool:
        """True for a network of the same form: it differs in the values of its tensors alone."""
        return _form(network) == self._form

    def _views(self, block: Tensor) -> list[Tensor]:
        return [
            block[place.begin : place.begin + place.num_bytes].view(place.dtype).view(place.shape)
            for place in self._places
        ]


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


def _dtypes(network: nn.Module, dtype: torch.dtype) -> dict[int, torch.dtype]:
    """The precision in which each tensor, by its id, is kept."""
    dtypes = {id(tensor): tensor.dtype for tensor in _tensors(network)}
    if dtype == torch.bfloat16:
        for module in network.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                dtypes |= {id(tensor): torch.bfloat16 for tensor in module.parameters(recurse=False)}
    return dtypes


def _form(network: nn.Module) -> list[Any]:
    """Modules by name and class with what they remember, and the tensors' shapes and precisions."""
    modules: list[Any] = [
        (name, type(module), {key: value for key, value in vars(module).items() if not key.startswith("_")})
        for name, module in network.named_modules()
    ]
    return modules + [(tensor.shape, tensor.dtype) for tensor in _tensors(network)]
