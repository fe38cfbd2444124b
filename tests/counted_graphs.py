"""Graphs that torch.compile makes, counted; what is compiled is only traced, since to make code takes seconds each."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.utils import counters


class Graphs:
    """Graphs made since the count began."""

    @property
    def num(self) -> int:
        return int(counters["stats"]["unique_graphs"])

    @property
    def breaks(self) -> dict[str, int]:
        """Reasons why code is in more than one."""
        return dict(counters["graph_break"])


@contextmanager
def counted_graphs(backend: str = "eager") -> Iterator[Graphs]:
    """Begin anew, with this backend for whatever is compiled: eager, or aot_eager where gradients are needed."""
    torch.compiler.reset()
    counters.clear()
    torch.compiler.set_default_backend(backend)
    try:
        yield Graphs()
    finally:
        torch.compiler.set_default_backend(None)
        torch.compiler.reset()
