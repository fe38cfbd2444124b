"""What a training step asks of a GPU, counted without one: kernels, bytes and FLOPs of our own code on meta tensors.

The estimates divide what is counted by what such cards were seen to reach; they aren't measurements.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ddm_ray.core.condition import Condition
from ddm_ray.core.flow import Flow
from ddm_ray.models.dit import DiT
from ddm_ray.models.flops import num_parameters
from ddm_ray.train.objectives import Batch, ExpertLoss

PRODUCTS, ATTENTION, REST = "products", "attention", "elementwise, norms, sums"
XL_2 = {"image_size": 32, "channels": 4, "num_classes": 1000, "patch_size": 2, "width": 1152, "depth": 28, "heads": 16}


@dataclass(frozen=True)
class Card:
    """A GPU: what it can do at the most, and what programs were seen to reach. Bytes and FLOPs a second."""

    peak: float = 989.4e12  # bf16, dense
    products: float = 600e12
    attention: float = 280e12
    memory: float = 2.8e12
    launch: float = 2.5e-6  # seconds a kernel takes at least


CARDS = {"H100": Card(), "H200": Card(memory=4.0e12)}


@dataclass
class Kind:
    """Kernels of one kind; `seconds`: estimated, by card."""

    kernels: int = 0
    bytes: int = 0
    flops: int = 0
    seconds: Counter[str] = field(default_factory=Counter)

    def add(self, moved: int, flops: int, rates: dict[str, float]) -> None:
        """One kernel more, of `rates` FLOPs a second by card."""
        self.kernels, self.bytes, self.flops = self.kernels + 1, self.bytes + moved, self.flops + flops
        for name, rate in rates.items():
            self.seconds[name] += max(moved / CARDS[name].memory, flops / rate, CARDS[name].launch)


class Counted(TorchDispatchMode):
    """Counts what is computed within it, by kind. An operation is one kernel that reads its tensors and writes others.

    Views, and memory without values, are none. `waits`: how often the host reads a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds = {kind: Kind() for kind in (PRODUCTS, ATTENTION, REST)}
        self.waits = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        name, aliases = operation._schema.name.split("::")[1], _aliases(operation)
        self.waits += name == "_local_scalar_dense"
        if set(aliases) == {False} or name == "_unsafe_view" or "empty" in name or not (aliases or num_bytes(result)):
            return result
        # What is written in place is read before, by most.
        written = [value for value, is_written in zip(args, _by_argument(operation), strict=False) if is_written]
        read = args[1:] if name in ("copy_", "fill_", "zero_") else (args, kwargs)
        moved = num_bytes(read) + num_bytes(written if aliases else result)
        count = flop_registry.get(operation._overloadpacket)
        kind = ATTENTION if "attention" in name else PRODUCTS if "mm" in name else REST
        rates = {each: card.attention if kind == ATTENTION else card.products for each, card in CARDS.items()}
        self.kinds[kind].add(moved, count(*args, **kwargs, out_val=result) if count else 0, rates)
        return result

    @property
    def total(self) -> Kind:
        """All kinds together."""
        kinds = self.kinds.values()
        seconds = sum((kind.seconds for kind in kinds), Counter[str]())
        return Kind(*(sum(getattr(kind, name) for kind in kinds) for name in ("kernels", "bytes", "flops")), seconds)


def num_bytes(tree: Any) -> int:
    """Bytes of all tensors of a tree."""
    return sum(part.numel() * part.element_size() for part in tree_leaves(tree) if isinstance(part, Tensor))


def _by_argument(operation: Any) -> list[bool]:
    return [bool(each.alias_info and each.alias_info.is_write) for each in operation._schema.arguments]


def _aliases(operation: Any) -> list[bool]:
    """Of each argument that shares memory with the result, if it is written."""
    return [each.alias_info.is_write for each in operation._schema.arguments if each.alias_info]


class _Flash(TorchFunctionMode):
    """Attention as a GPU does it; elsewhere torch takes it apart."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention and len(args) == 3 and not kwargs:
            return torch.ops.aten._scaled_dot_product_flash_attention(*args)[0]
        return function(*args, **(kwargs or {}))


@contextmanager
def kept() -> Iterator[Kind]:
    """Counts bytes that the forward pass keeps for the backward pass, each memory once, without parameters."""
    kind, seen = Kind(), set[int]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and not tensor._is_view() and id(storage) not in seen:
            seen.add(id(storage))
            kind.bytes += num_bytes(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kind


def counted_pass(model: nn.Module, rows: int, shape: tuple[int, int, int], condition: Condition) -> Counted:
    """Forward and backward pass of `rows` rows of a network on meta, by an expert's loss, as a trainer does it."""
    with torch.device("meta"):
        data, noise = torch.empty(rows, *shape), torch.empty(rows, *shape)
        batch = Batch(data, noise, torch.empty(rows), condition, torch.empty(rows, dtype=torch.int64))
        weight_B = torch.empty(rows)
    model.zero_grad()
    with _Flash(), Counted() as counted:
        (ExpertLoss(Flow())(model, batch) * weight_B).sum().backward()
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256], help="rows of a micro-batch")
    parser.add_argument("--optimizer", type=float, default=68, help="bytes a parameter that the optimizer moves")
    args = parser.parse_args()
    with torch.device("meta"):
        model = DiT(**XL_2).bfloat16()
    parameters = num_parameters(model)
    for rows in args.rows:
        counted = counted_pass(model, rows, (4, 32, 32), torch.empty(rows, dtype=torch.int64, device="meta"))
        print(f"DiT-XL/2, {parameters / 1e6:.0f} M parameters, {rows} rows, bf16:\n")
        print("| | kernels | GB | TFLOP | ms, H100 | ms, H200 |\n|---|---|---|---|---|---|")
        for name, kind in [*counted.kinds.items(), ("all", counted.total)]:
            times = " | ".join(f"{1e3 * kind.seconds[card]:.1f}" for card in CARDS)
            print(f"| {name} | {kind.kernels:,} | {kind.bytes / 1e9:.1f} | {kind.flops / 1e12:.2f} | {times} |")
        for name, card in CARDS.items():
            seconds = counted.total.seconds[name] + args.optimizer * parameters / card.memory
            mfu = counted.total.flops / seconds / card.peak
            print(f"\n{name}: {1e3 * seconds:.0f} ms a step, MFU {mfu:.0%}, estimated", end="")
        print("\n")


if __name__ == "__main__":
    main()
