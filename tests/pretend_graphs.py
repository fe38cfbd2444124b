"""CUDA graphs that aren't there: what is captured is written down, and done again on the same tensors at each replay.

As on a GPU, graphs of one pool compute in the same memory: whatever one leaves there is gone when another one runs.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pretend_gpu import INDEXING, READS


class _Recording(TorchDispatchMode):
    def __init__(self, graph: "PretendGraph"):
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode composite operations come whole
            if (result := operation.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        name = operation._schema.name.split("::")[1]
        masks = [part for part in tree_leaves(args)[1:] if isinstance(part, Tensor) and part.dtype == torch.bool]
        if name in READS or (name in INDEXING and masks):
            raise RuntimeError(f"{name}: the host can't wait for what is only captured")
        result = operation(*args, **kwargs)
        self._graph.steps.append((operation, args, kwargs, result))
        return result


class PretendGraph:
    """A graph, whose steps are operations with their arguments and the tensors that they made."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.others: list[PretendGraph] = []

    def replay(self) -> None:
        for operation, args, kwargs, result in self.steps:
            given = {part.untyped_storage().data_ptr() for part in _tensors((args, kwargs))}
            for made, again in zip(_tensors(result), _tensors(operation(*args, **kwargs)), strict=True):
                if made.untyped_storage().data_ptr() not in given:
                    made.copy_(again)
        for graph in self.others:
            if graph is not self:
                graph.spoil()

    def spoil(self) -> None:
        """Overwrite whatever it made."""
        for _, args, kwargs, result in self.steps:
            given = {part.untyped_storage().data_ptr() for part in _tensors((args, kwargs))}
            for made in _tensors(result):
                if made.untyped_storage().data_ptr() not in given and made.is_floating_point():
                    made.fill_(torch.nan)


class Stream:
    """A stream, which `waits_for` others."""

    def __init__(self, device: object = None):
        self.waits_for: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waits_for.append(other)


class PretendCUDA:
    """All tensors are on it. `captures`: graphs in their order, on a stream that has waited for the current one."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.captures: list[PretendGraph] = []
        self._pools = defaultdict[object, list[PretendGraph]](list)
        self.current = Stream()
        for name, value in {
            "CUDAGraph": PretendGraph,
            "graph": self._graph,
            "graph_pool_handle": object,
            "Stream": Stream,
            "current_stream": lambda: self.current,
            "stream": lambda stream: nullcontext(),
            "device": lambda device: nullcontext(),
        }.items():
            patch.setattr(torch.cuda, name, value)
        for name, value in {"is_cuda": True, "is_cpu": False}.items():
            patch.setattr(Tensor, name, value, raising=False)

    @contextmanager
    def _graph(self, graph: PretendGraph, *, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert stream is not self.current and self.current in stream.waits_for
        assert capture_error_mode == "thread_local", "another mode ends a capture when another thread allocates"
        self.captures.append(graph)
        graph.others = self._pools[pool]
        graph.others.append(graph)
        with _Recording(graph):
            yield


def _tensors(tree: Any) -> list[Tensor]:
    return [part for part in tree_leaves(tree) if isinstance(part, Tensor)]
