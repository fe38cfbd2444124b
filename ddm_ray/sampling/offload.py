"""Offloading: few experts are on the device at a time, the others in host memory or in files until they are called."""

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddm_ray.errors import SamplingError
from ddm_ray.sampling.device_slots import DeviceSlot, Fetch
from ddm_ray.sampling.driver import Experts, Field
from ddm_ray.sampling.packed_weights import Packed, PackedWeights

Offload = Literal["disk", "host"]
OnFetch = Callable[[int, float, float], None]
"""Called with an expert that was fetched, the seconds that took, and those for which computing waited for it."""


class Offloaded(ABC):
    """Experts of which `resident` (2 or more) are on the device at a time; the next is fetched while one computes.

    What a fetch raises is raised where the expert is called. `present`: for each expert, False where there is none.
    `dtype`: that of their weights.
    """

    dtype: torch.dtype = torch.float32

    def __init__(self, present: Sequence[bool], resident: int = 2):
        if resident < 2:
            raise SamplingError(f"resident is {resident}: use 2 or more, one expert computes while the next is fetched")
        self.present = list(present)
        self.num_fetched = 0
        self.resident = resident
        self._here: OrderedDict[int, Future[Field]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.present)

    def __getitem__(self, expert: int) -> Field | None:
        if not self.present[expert]:
            return None
        self.prefetch(expert)
        return self._here[expert].result()

    @property
    def here(self) -> list[int]:
        """Experts that are on the device or on their way there, the one unused for longest first."""
        return list(self._here)

    def arrived(self, expert: int) -> bool:
        """True if nothing would wait for this one of those that are `here`."""
        return self._here[expert].done()

    def prefetch(self, expert: int, leaving: int | None = None) -> None:
        """Begin to fetch an expert that will be called soon; `leaving`, or the one unused for longest, makes room."""
        if not self.present[expert]:
            return
        if expert in self._here and not _failed(self._here[expert]):
            self._here.move_to_end(expert)
            return
        if expert in self._here:
            self._leave(expert)
        while len(self._here) >= self.resident:
            self._leave(next(iter(self._here)) if leaving is None else leaving)
        self.num_fetched += 1
        self._here[expert] = self._begin(expert)

    def _leave(self, expert: int) -> None:
        del self._here[expert]

    @abstractmethod
    def _begin(self, expert: int) -> "Future[Field]": ...


class OffloadedToDisk(Offloaded):
    """Experts that `fetch(k)` brings to the device from wherever they are, in a thread."""

    def __init__(self, fetch: Callable[[int], Field], present: Sequence[bool], resident: int = 2):
        super().__init__(present, resident)
        self._fetch = fetch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fetch-expert")

    def close(self) -> None:
        """End the thread, once what it fetches is there."""
        self._thread.shutdown(cancel_futures=True)

    def _begin(self, expert: int) -> "Future[Field]":
        return self._thread.submit(self._fetch, expert)


class OffloadedToHost(Offloaded):
    """Experts as blocks of host memory (`PackedWeights`), and slots on the device that are theirs in turn.

    Slots are made once, `resident` of them, and never move: networks compute with what was last copied there. A fetch
    is one copy. On a GPU it comes from pinned memory on a stream of its own, after the kernels that read what was there
    before; kernels that read it wait for it there, and the host for nothing. Torch rounds each pinned block up to a
    power of two, unless PYTORCH_ALLOC_CONF has `pinned_max_round_threshold_mb`.
    """

    on_fetch: OnFetch | None = None

    def __init__(
        self,
        load: Callable[[int], nn.Module],
        present: Sequence[bool],
        device: torch.device | str,
        resident: int = 2,
        packed: Mapping[int, Packed] | None = None,
    ):
        """`load(k)` gives expert k on the CPU, each is held once; those of several forms share the slots.

        `packed`: experts as another of these holds them, which need not be loaded.
        """
        super().__init__(present, resident)
        device = torch.device(device)
        copying = torch.cuda.Stream(device) if _has_streams(device) else None
        self.packed = dict(packed or {})
        self._forms = list(dict.fromkeys(each.form for each in self.packed.values()))
        for expert in (number for number, exists in enumerate(present) if exists and number not in self.packed):
            network = load(expert)
            form = self._form(network)
            block = form.block(network)
            self.packed[expert] = Packed(form, block.pin_memory() if copying else block)
        num_slots = min(resident, len(self.packed))
        self._free = [DeviceSlot(self._forms, device, copying) for _ in range(num_slots)]
        self._slots: dict[int, DeviceSlot] = {}
        self._fetches: dict[int, Fetch] = {}
        self._unmeasured: deque[tuple[int, Fetch]] = deque()

    def form_of(self, expert: int) -> PackedWeights | None:
        """The form that experts alike share; None for an expert that isn't there."""
        packed = self.packed.get(expert)
        return packed.form if packed else None

    def _form(self, network: nn.Module) -> PackedWeights:
        """The form of a network; a new one where there is none like it."""
        for form in self._forms:
            if form.fits(network):
                return form
        self._forms.append(PackedWeights(network))
        return self._forms[-1]

    def arrived(self, expert: int) -> bool:
        return expert not in self._fetches or self._fetches[expert].arrived

    def measure(self) -> None:
        """Tell `on_fetch` of the fetches that have ended."""
        while self._unmeasured and (measured := self._unmeasured[0][1].measured()) is not None:
            expert, _ = self._unmeasured.popleft()
            if self.on_fetch:
                self.on_fetch(expert, *measured)

    def _leave(self, expert: int) -> None:
        super()._leave(expert)
        self._free.append(self._slots.pop(expert))
        if expert in self._fetches:
            self._fetches.pop(expert).leave()

    def _begin(self, expert: int) -> "Future[Field]":
        self.measure()
        begun, slot = Future[Field](), self._free.pop()
        self._slots[expert] = slot
        try:
            packed = self.packed[expert]
            fetch = self._fetches[expert] = slot.fetch(packed.form, packed.block)
        except Exception as error:
            begun.set_exception(error)
        else:
            self._unmeasured.append((expert, fetch))
            begun.set_result(partial(self._velocity, expert, fetch, slot))
        return begun

    def _velocity(self, expert: int, fetch: Fetch, slot: DeviceSlot, *inputs: Any) -> Tensor:
        assert self._fetches.get(expert) is fetch, f"expert {expert} has left"
        fetch.wait()
        try:
            answer: Tensor = slot.networks[self.packed[expert].form](*inputs)
        finally:
            slot.was_read()
        return answer


def resident_experts(
    fetch: Callable[[int, str], nn.Module],
    present: Sequence[bool],
    offload: Offload | None,
    device: str,
    dtype: torch.dtype = torch.float32,
) -> Experts:
    """The experts of a mixture, None where `present` is False; `fetch(k, where)` loads expert k, in dtype, to a device.

    All are on `device`, or with `offload` two at a time: the others in files ("disk"), to be fetched from there each
    time, or in the "host"'s memory. SamplingError for another word.
    """
    if offload not in (None, "disk", "host"):
        raise SamplingError(f"unknown offload {offload!r}: use disk, host or None")
    if offload is None:
        return tuple(fetch(expert, device) if here else None for expert, here in enumerate(present))
    experts: Offloaded
    if offload == "disk":
        experts = OffloadedToDisk(lambda expert: fetch(expert, device), present)
    else:
        experts = OffloadedToHost(lambda expert: fetch(expert, "cpu"), present, device)
    experts.dtype = dtype
    return experts


def _failed(future: "Future[Field]") -> bool:
    return future.done() and future.exception() is not None


def _has_streams(device: torch.device) -> bool:
    return device.type == "cuda"
