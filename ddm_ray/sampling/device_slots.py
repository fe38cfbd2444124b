"""Slots on a device that hold one network's weights after another's, and the copies that bring them there."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ddm_ray.sampling.packed_weights import PackedWeights


class DeviceSlot:
    """Memory of a device for one network's weights, made once, and networks of some forms that compute with it.

    On a GPU, weights come on the stream `copying`, after the kernels that read those before them.
    """

    def __init__(self, forms: Sequence[PackedWeights], device: torch.device, copying: torch.cuda.Stream | None):
        with torch.inference_mode(False):  # else only code in that mode could copy there
            block = torch.empty(max(form.num_bytes for form in forms), dtype=torch.uint8, device=device)
            self._blocks = {form: block[: form.num_bytes] for form in forms}
            self.networks: dict[PackedWeights, nn.Module] = {form: form.network(block) for form in forms}
        self._device, self._copying = device, copying
        self._read = torch.cuda.Event() if copying else None
        if copying:
            # Else its memory could be another's again while a copy is on its way.
            block.record_stream(copying)
            self.was_read()

    def fetch(self, form: PackedWeights, source: Tensor) -> "Fetch":
        """Begin to copy a block of this form from the host's memory; pinned, where the slot is on a GPU."""
        if self._copying is None:
            return Fetch(self._blocks[form], source)
        assert self._read is not None
        self._copying.wait_event(self._read)
        return AsyncFetch(self._blocks[form], source, self._copying)

    def was_read(self) -> None:
        """Note that kernels which read the weights have just been given to the device."""
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self._device))


class Fetch:
    """A copy of weights into a slot: done at once, on a CPU."""

    def __init__(self, target: Tensor, source: Tensor):
        began = time.perf_counter()
        target.copy_(source)
        self._seconds = time.perf_counter() - began

    @property
    def arrived(self) -> bool:
        """True once the weights are there."""
        return True

    def wait(self) -> None:
        """Have the kernels that come next on the current stream wait for it; not the host."""

    def leave(self) -> None:
        """Note that these weights won't be asked for any more."""

    def measured(self) -> tuple[float, float] | None:
        """Seconds that it took, and those for which kernels waited for it; None where that isn't known yet."""
        return self._seconds, self._seconds


class AsyncFetch(Fetch):
    """A copy on a GPU's stream of its own."""

    def __init__(self, target: Tensor, source: Tensor, copying: torch.cuda.Stream):
        self._began, self._ended, self._asked = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self._device = target.device
        self._was_asked = self._has_left = False
        with torch.cuda.stream(copying):
            self._began.record(copying)
            target.copy_(source, non_blocking=True)
            self._ended.record(copying)

    @property
    def arrived(self) -> bool:
        return self._ended.query()

    def wait(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if not self._was_asked:
            self._asked.record(current)
            self._was_asked = True
        current.wait_event(self._ended)

    def leave(self) -> None:
        self._has_left = True

    def measured(self) -> tuple[float, float] | None:
        if not self._ended.query() or not (self._asked.query() if self._was_asked else self._has_left):
            return None
        waited = self._asked.elapsed_time(self._ended) if self._was_asked else 0.0
        return self._began.elapsed_time(self._ended) / 1e3, max(0.0, waited) / 1e3
