"""A copy in memory of what a rank holds of a training state, taken while training goes on, and written from there."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import torch
from torch import Tensor

from ddm_ray.run.manifest import FileRecord
from ddm_ray.store.store import Store
from ddm_ray.train.fragments import EMA, RECORDS, Fragment
from ddm_ray.train.state import INDEX, PART, Piece, cut, fingerprint, index_bytes, index_entry, part_header

WRITERS = 4
"""Parts that are hashed and written at a time beside a GPU's training: one thread takes a minute for 3B parameters."""


class Part:
    """A file of pieces in memory: its header is written once, its tensors are views that are copied into."""

    def __init__(self, record: str, number: int, pieces: list[Piece], pinned: bool):
        self.record, self.pieces = record, pieces
        self.name = PART.format(record, number)
        sizes = [piece.numel for piece in pieces]
        header = part_header(pieces)
        self._bytes = torch.empty(len(header) + 4 * sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        self._bytes[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.views = self._bytes[len(header) :].view(torch.float32).split(sizes)

    @property
    def data(self) -> memoryview:
        """The file's bytes, not copied."""
        return memoryview(self._bytes.numpy())  # type: ignore[arg-type]


class Snapshot:
    """Memory for a copy of what a rank owns, used again for every state. `take` is all that training waits for.

    On a GPU it waits for nothing: whoever writes has a stream copy, beside the next step's passes. What is copied may
    change once the device has waited for that (`settle`).
    """

    def __init__(self, fragments: list[Fragment]):
        self._sources: list[Tensor] = []
        self.parts: list[Part] = []
        self._device = fragments[0].records[EMA].device if fragments else torch.device("cpu")
        for record in RECORDS:
            for number, group in enumerate(cut(fragments)):
                pieces = [Piece(one.name, one.start, one.numel) for one in group]
                self.parts.append(Part(record, number, pieces, pinned=self._device.type != "cpu"))
                self._sources += [one.records[record] for one in group]
        self._copies = [view for part in self.parts for view in part.views]
        self._prints_R = torch.zeros(len(RECORDS), dtype=torch.int64)
        self._computed: torch.cuda.Event | None = None
        self._copied: torch.cuda.Event | None = None
        self._given = Event()  # to the device, by whoever writes
        self._taken = False
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Copy the fragments as they are now, or on a GPU as they will be after what it was given so far."""
        self._taken = True
        if not self._copies:
            return  # a small model on many ranks
        if self._device.type == "cpu":
            torch._foreach_copy_(self._copies, self._sources)
            return
        self._given.clear()
        self._computed, self._copied = torch.cuda.Event(), torch.cuda.Event(blocking=True)
        self._computed.record(torch.cuda.current_stream(self._device))

    def settle(self) -> None:
        """Have what the device is given from here on wait until all is copied, which somebody must be about."""
        if self._copied:
            self._given.wait()
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    @torch.no_grad()
    def copy(self) -> None:
        """Do what is left of `take`: on a GPU copy by a stream of its own, and wait for it.

        Not by the training's thread, since a device's queue has an end.
        """
        if self._copied is None or self._given.is_set():
            return
        assert self._computed
        try:
            self._stream = self._stream or torch.cuda.Stream(self._device)
            self._stream.wait_event(self._computed)
            with torch.cuda.stream(self._stream):
                torch._foreach_copy_(self._copies, self._sources, non_blocking=True)
                # Where memory is fast: by a CPU they take longer than all else of a state.
                self._prints_R = torch.empty(len(RECORDS), dtype=torch.int64).pin_memory()
                self._prints_R.copy_(self._fingerprints(self._sources), non_blocking=True)
                self._copied.record(self._stream)
        finally:
            self._given.set()
        self._copied.synchronize()

    def _fingerprints(self, tensors: list[Tensor]) -> Tensor:
        """Fingerprints by record, of the values that pieces have in these tensors; see `fingerprint`."""
        prints: dict[str, list[Tensor]] = {record: [] for record in RECORDS}
        pieces = [(part.record, piece) for part in self.parts for piece in part.pieces]
        for (record, piece), values in zip(pieces, tensors, strict=True):
            prints[record].append(fingerprint(piece, values))
        return torch.stack([torch.stack(each).sum() for each in prints.values()])

    def write(self, store: Store, prefix: str) -> None:
        """Write the parts of what was taken below `prefix/`, once, and last the index that says so."""
        assert self._taken, "else what was taken before would have another step's name"
        self._taken = False
        self.copy()

        def put(part: Part) -> tuple[str, dict[str, Any]]:
            store.write(f"{prefix}/{part.name}", part.data)
            return part.name, index_entry(FileRecord.of(part.data), part.record, part.pieces)

        if self._device.type == "cpu":  # its cores are training's
            parts = dict(map(put, self.parts))
        else:
            with ThreadPoolExecutor(WRITERS) as pool:
                parts = dict(pool.map(put, self.parts))
        if self._device.type == "cpu" and self._copies:
            self._prints_R = self._fingerprints(self._copies)
        store.write(f"{prefix}/{INDEX}", index_bytes(parts, dict(zip(RECORDS, self._prints_R.tolist(), strict=True))))
