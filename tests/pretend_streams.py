"""Streams and events of a GPU that isn't there: which work is surely after which, and what isn't but has to be.

`with pretended() as gpu:` is a `PretendGPU` on which torch.cuda's streams and events work, on device "meta". Work of
different streams that touches the same memory, one of them writing, must be ordered by events: else it is one of
`gpu.races`. A copy from the host takes a second of `gpu.now`, all else no time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ddm_ray.sampling import offload
from tests.pretend_gpu import OnGPU, PretendGPU

Clock = dict[int, int]


class Stream:
    """`clock`: how much of each stream's work its next piece comes after."""

    def __init__(self, gpu: "PretendStreams"):
        self.gpu, self.number = gpu, len(gpu.streams)
        self.clock: Clock = {}
        gpu.streams.append(self)

    def wait_event(self, event: "Event") -> None:
        for number, count in event.clock.items():
            self.clock[number] = max(self.clock.get(number, 0), count)

    def synchronize(self) -> None:
        self.gpu._wait("stream")


class Event:
    def __init__(self, gpu: "PretendStreams"):
        self.gpu, self.clock = gpu, Clock()
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        self.clock, self.at = dict(stream.clock), self.gpu.now

    def query(self) -> bool:
        return not self.gpu.behind

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.at - self.at)

    def synchronize(self) -> None:
        self.gpu._wait("event")


class PretendStreams(PretendGPU):
    """`behind`: nothing has been done yet of what was given to it, as far as events tell."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self.races: list[str] = []
        self.now, self.behind = 0.0, False
        # By memory: the last work that wrote it, and since then the last of each stream that read it.
        self._writes: dict[int, tuple[int, int]] = {}
        self._reads: dict[int, Clock] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.uploads)
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        name, arguments = operation._schema.name.split("::")[1], operation._schema.arguments
        if not any(each.alias_info and not each.alias_info.is_write for each in arguments):  # views are no work
            stream = self.current
            stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
            for argument, value in zip(arguments, args, strict=False):
                for tensor in tree_leaves(value):
                    if isinstance(tensor, OnGPU):
                        self._touched(name, tensor, bool(argument.alias_info))
        self.now += len(self.uploads) - before if name == "copy_" else 0
        return result

    def _touched(self, name: str, tensor: OnGPU, written: bool) -> None:
        stream, memory = self.current, tensor.inner.untyped_storage().data_ptr()
        before = [self._writes[memory]] if memory in self._writes else []
        if written:
            before += self._reads.pop(memory, {}).items()
        if any(stream.clock.get(number, 0) < count for number, count in before):
            self.races.append(f"{name} {'writes' if written else 'reads'} on stream {stream.number}")
        if written:
            self._writes[memory] = stream.number, stream.clock[stream.number]
        else:
            self._reads.setdefault(memory, {})[stream.number] = stream.clock[stream.number]


@contextmanager
def pretended() -> Iterator[PretendStreams]:
    """A GPU with streams, which is device "meta"."""
    gpu = PretendStreams()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, gpu.current = gpu.current, stream
        try:
            yield
        finally:
            gpu.current = before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(gpu))
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False, blocking=False: Event(gpu))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: gpu.current)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: gpu.pinned(tensor))
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(offload, "_has_streams", lambda device: device.type == "meta")
        with gpu:
            yield gpu
