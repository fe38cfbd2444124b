"""A GPU that isn't there: tensors that say that they are on device `meta`, with true values, whose waits are counted.

`with PretendGPU() as gpu:` runs the product with device="meta" on a machine without a GPU. Operations that mix devices
fail as they would there (0-dimensional tensors of the CPU may join), and what makes the host wait is counted by what it
is and where.
"""

import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Operations whose result the host has to know.
READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "_unique2", "unique_dim", "masked_select"}
COPIES = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # by numbers; a mask has to be counted first


class OnGPU(Tensor):
    """A tensor of the device, whose values are `inner`'s."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGPU":
        made: OnGPU = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=torch.device("meta")
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{operation} outside of the pretended GPU")


class PretendGPU(TorchDispatchMode):
    """`waits`: how often the host waited, by what for and which line of the product.

    `uploads`: bytes of each copy from the host, and whether it went to memory that was there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.uploads: list[tuple[int, bool]] = []
        self._pinned: dict[int, Tensor] = {}

    def pinned(self, tensor: Tensor) -> Tensor:
        """A copy that is pinned, which torch can't make without a driver."""
        return self._as_pinned(tensor.clone())

    def _as_pinned(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor | None) -> bool:
        return tensor is not None and tensor.untyped_storage().data_ptr() in self._pinned

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            return self._as_pinned(operation(*args, **kwargs))
        with self:  # in inference mode composite operations come whole
            if (result := operation.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        name = operation._schema.name.split("::")[1]
        if name == "_foreach_copy_":
            with self:
                for to, values in zip(*args[:2], strict=True):
                    to.copy_(values, *args[2:], **kwargs)
            return None
        tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        device = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        ours = any(isinstance(part, OnGPU) for part in tensors)
        if name in COPIES:
            return self._copied(operation, name, tensors, device, args, kwargs)
        if strangers := [part for part in tensors if ours and not isinstance(part, OnGPU) and part.dim()]:
            if name not in INDEXING:
                raise RuntimeError(f"{operation}: tensors of the GPU and of the CPU at once, {_place()}")
            self._wait("host to device", len(strangers))
        masks = [part for part in tensors[1:] if part.dtype in (torch.bool, torch.uint8)]
        if ours and (name in READS or (name in INDEXING and masks)):
            self._wait(name)
        result = operation(*tree_map(_inner, args), **tree_map(_inner, self._on_cpu(kwargs)))
        if not ours and device != "meta":
            return result
        same = {id(part.inner): part for part in tensors if isinstance(part, OnGPU)}
        return tree_map(lambda part: same.get(id(part), OnGPU(part)) if isinstance(part, Tensor) else part, result)

    def _copied(
        self, operation: Any, name: str, tensors: list[Tensor], device: str | None, args: Any, kwargs: Any
    ) -> Any:
        source = tensors[-1]
        non_blocking = kwargs.get("non_blocking", False) or (name == "copy_" and args[2:] == (True,))
        target = isinstance(tensors[0], OnGPU) if name == "copy_" or device is None else device == "meta"
        of_host = source if target else tensors[0] if name == "copy_" else None
        waits = not (non_blocking and self._is_pinned(of_host))
        if target is not isinstance(source, OnGPU) and waits:
            self._wait("host to device" if target else "device to host")
        if target and not isinstance(source, OnGPU):
            self.uploads.append((source.nbytes, name == "copy_"))
        result = operation(*tree_map(_inner, args), **self._on_cpu(kwargs))
        if name == "copy_":
            return tensors[0]
        return OnGPU(result) if target else result

    def _wait(self, reason: str, times: int = 1) -> None:
        self.waits[f"{reason}, {_place()}"] += times

    def _on_cpu(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs


def _inner(part: Any) -> Any:
    return part.inner if isinstance(part, OnGPU) else part


def _place() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/ddm_ray/" in frame.filename]
    return f"{frames[-1].filename.rpartition('/ddm_ray/')[2]}:{frames[-1].lineno}" if frames else "in a test"
