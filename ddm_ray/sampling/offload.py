"""Offloading: few experts are on the device at a time, the others in host memory or in files until they are called."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch
from torch import nn
from torch.func import functional_call

from ddm_ray.errors import SamplingError
from ddm_ray.sampling.driver import Experts, Field

Offload = Literal["disk", "host"]


class Offloaded:
    """Experts of which `resident` (2 or more) are on the device at a time; the next is fetched while one computes.

    `fetch(k)` brings expert k to the device; what it raises is raised where the expert is called. `present`: for each
    expert, False where there is none.
    """

    def __init__(self, fetch: Callable[[int], Field], present: Sequence[bool], resident: int = 2):
        if resident < 2:
            raise SamplingError(f"resident is {resident}: use 2 or more, one expert computes while the next is fetched")
        self.present = list(present)
        self.num_fetched = 0
        self._fetch, self._resident = fetch, resident
        self._here: OrderedDict[int, Future[Field]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fetch-expert")

    def __len__(self) -> int:
        return len(self.present)

    def __getitem__(self, expert: int) -> Field | None:
        if not self.present[expert]:
            return None
        self.prefetch(expert)
        return self._here[expert].result()

    def prefetch(self, expert: int) -> None:
        """Begin to fetch an expert that will be called soon; the one unused for longest makes room."""
        if not self.present[expert]:
            return
        if expert in self._here and not _failed(self._here[expert]):
            self._here.move_to_end(expert)
            return
        self._here.pop(expert, None)
        while len(self._here) >= self._resident:
            self._here.popitem(last=False)
        self.num_fetched += 1
        self._here[expert] = self._thread.submit(self._fetch, expert)


def resident_experts(
    fetch: Callable[[int, str], nn.Module], present: Sequence[bool], offload: Offload | None, device: str
) -> Experts:
    """The experts of a mixture, None where `present` is False; `fetch(k, where)` loads expert k to a device.

    All are on `device`, or with `offload` two at a time: the others in files ("disk"), to be fetched from there each
    time, or in the "host"'s memory. SamplingError for another word.
    """
    if offload not in (None, "disk", "host"):
        raise SamplingError(f"unknown offload {offload!r}: use disk, host or None")
    if offload == "disk":
        return Offloaded(lambda expert: fetch(expert, device), present)
    home = "cpu" if offload else device
    experts = tuple(fetch(expert, home) if here else None for expert, here in enumerate(present))
    return Offloaded(from_host(experts, device), present) if offload else experts


def from_host(models: Sequence[nn.Module | None], device: torch.device | str) -> Callable[[int], Field]:
    """A `fetch` that copies a model's tensors from host memory to the device.

    On a GPU they come from pinned memory on a stream of their own, so that copying and computing overlap.
    """
    stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
    for model in models if stream else ():
        if model is not None:
            model._apply(lambda tensor: tensor.pin_memory())

    def fetch(expert: int) -> Field:
        model = models[expert]
        assert model is not None
        named = [*model.named_parameters(), *model.named_buffers()]
        with torch.cuda.stream(stream):
            tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in named}
        if stream:
            stream.synchronize()
            for tensor in tensors.values():
                # Else its memory might be given away while kernels of the computing stream still read it.
                tensor.record_stream(torch.cuda.default_stream(device))
        return lambda *inputs: functional_call(model, tensors, inputs)

    return fetch


def _failed(future: "Future[Field]") -> bool:
    return future.done() and future.exception() is not None
