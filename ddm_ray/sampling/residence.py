"""Where experts wait until they are called: all on the device, or elsewhere, fetched when their turn comes."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn
from torch.func import functional_call

from ddm_ray.errors import SamplingError
from ddm_ray.sampling.driver import Field


class Offloaded:
    """Experts of which `resident` are on the device at a time; the next is fetched while one computes.

    `fetch(k)` brings expert k to the device, from host memory or from files; what it raises is raised where the
    expert is called. With 2 (the least), one computes while the next comes.
    """

    def __init__(self, fetch: Callable[[int], Field], there: Sequence[bool], resident: int = 2):
        if resident < 2:
            raise SamplingError(f"resident is {resident}: use 2 or more, one expert computes while the next is fetched")
        self.there = list(there)
        self.num_fetched = 0
        self._fetch, self._resident = fetch, resident
        self._here: OrderedDict[int, Future[Field]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fetch-expert")

    def __len__(self) -> int:
        return len(self.there)

    def __getitem__(self, expert: int) -> Field | None:
        if not self.there[expert]:
            return None
        self.prefetch(expert)
        return self._here[expert].result()

    def prefetch(self, expert: int) -> None:
        """Begin to fetch an expert that will be called soon; the one unused for longest makes room."""
        if not self.there[expert]:
            return
        if expert in self._here and not _failed(self._here[expert]):
            self._here.move_to_end(expert)
            return
        self._here.pop(expert, None)
        while len(self._here) >= self._resident:
            self._here.popitem(last=False)
        self.num_fetched += 1
        self._here[expert] = self._thread.submit(self._fetch, expert)


def from_host(models: Sequence[nn.Module], device: torch.device | str) -> Callable[[int], Field]:
    """A `fetch` that copies the tensors of a model in host memory to the device: on a GPU from pinned memory, on a
    stream of its own, so that copying and computing overlap.
    """
    stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
    if stream:
        for model in models:
            model._apply(lambda tensor: tensor.pin_memory())

    def fetch(expert: int) -> Field:
        model = models[expert]
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
