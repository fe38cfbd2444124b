"""Training state on storage: every rank's fragments as parts in safetensors, read at any world size and ZeRO stage.

A part holds pieces (runs of elements) of one record, named `<parameter>@<first element>`. A rank's INDEX.json lists
the pieces of each part, so that a reader fetches only the parts that it needs. The manifest lists all files and commits
them.
"""

import json
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple
from zlib import crc32

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from ddm_ray.errors import CorruptArtifact, StorageError
from ddm_ray.jobs.attempts import CURVE as CURVE
from ddm_ray.run.manifest import FileRecord, Manifest, canonical, read_verified
from ddm_ray.store.checksummed import parse_object
from ddm_ray.store.store import Store
from ddm_ray.train.zero_shards import Fragment

PART_BYTES = 64 * 2**20
"""Largest part in bytes. Pinned memory comes in powers of two: one byte more would take twice as much."""
HEADER_SHARE = 1 / 64
"""Share of a part that its header may take."""
READERS = 4
INDEX = "INDEX.json"
RANK = "rank-{:03d}"
PART = "{}-{:04d}.safetensors"


class Piece(NamedTuple):
    """Elements `start` up to `start + numel` of a flattened parameter."""

    name: str
    start: int
    numel: int

    @property
    def key(self) -> str:
        """Name of the piece in a part."""
        return f"{self.name}@{self.start}"


def part_header(pieces: list[Piece]) -> bytes:
    """Header of the part that holds these pieces."""
    return _safetensors_header({piece.key: (piece.numel,) for piece in pieces})


def index_entry(file: FileRecord, record: str, pieces: list[Piece]) -> dict[str, Any]:
    """Entry of a rank's index for a part: its file, its record and its pieces."""
    return {**vars(file), "record": record, "pieces": pieces}


def index_bytes(parts: Mapping[str, Any], prints: Mapping[str, int]) -> bytes:
    """A rank's index, of its parts' entries by name and of the fingerprints by record."""
    return canonical({"parts": parts, "fingerprints": {record: value % 2**64 for record, value in prints.items()}})


def cut(fragments: list[Fragment]) -> Iterator[list[Fragment]]:
    """Fragments in groups, of which each record fits into one part; larger fragments are cut."""
    most = int(PART_BYTES * (1 - HEADER_SHARE)) // 4
    group: list[Fragment] = []
    room = most
    for fragment in fragments:
        start, stop = fragment.start, fragment.start + fragment.numel
        while start < stop:
            piece = fragment.part(start, start + room)
            group.append(piece)
            room -= piece.numel
            start += piece.numel
            if room == 0:
                yield group
                group, room = [], most
    if group:
        yield group


def fingerprint(piece: Piece, values: Tensor) -> Tensor:
    """A sum modulo 2^64 over the bits of fp32 values, each weighted by its place; those of pieces add up.

    An int64 scalar on the values' device, which wraps around: its `int` modulo 2^64 is the sum.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    first = (crc32(piece.name.encode()) << 28) + piece.start
    # A CPU's caches hold a small chunk's temporaries; a GPU does a large one at once.
    size = 2**16 if values.device.type == "cpu" else 2**22
    for number, chunk in enumerate(values.detach().split(size)):
        place = torch.arange(len(chunk), device=chunk.device) + (first + number * size)
        total += (chunk.view(torch.int32).long() * (2 * place + 1)).sum()
    return total


def written_records(store: Store, prefix: str, world: int) -> dict[str, FileRecord]:
    """All ranks' files below `prefix/`, by their indexes. StorageError if one is gone."""
    records: dict[str, FileRecord] = {}
    for rank in range(world):
        folder = RANK.format(rank)
        try:
            data = store.read(f"{prefix}/{folder}/{INDEX}")
        except FileNotFoundError:
            raise StorageError(f"{store.url}/{prefix}/{folder}: {INDEX} is gone; deleted by a newer attempt") from None
        records[f"{folder}/{INDEX}"] = FileRecord.of(data)
        for name, entry in json.loads(data)["parts"].items():
            records[f"{folder}/{name}"] = FileRecord(entry["bytes"], entry["sha256"])
    return records


@dataclass(frozen=True)
class TrainProgress:
    """Progress of a job: finished steps, seconds trained, each step's loss and gradient norm (rank 0's alone)."""

    step: int
    seconds: float
    curve: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class StatePart:
    """A committed part: its name in the state, its record and its pieces."""

    name: str
    record: str
    pieces: list[Piece]


class SavedParts:
    """The parts of a committed state, by the ranks' indexes. CorruptArtifact for an index that was altered."""

    def __init__(self, store: Store, prefix: str, manifest: Manifest):
        self._store, self._prefix, self._files = store, prefix, manifest.files
        self.parts: list[StatePart] = []
        self.fingerprints = Counter[str]()
        for name in manifest.files:
            if not name.endswith(f"/{INDEX}"):
                continue
            try:
                self._add(name.removesuffix(INDEX), parse_object(self.read(name)))
            except (ValueError, KeyError, TypeError, AttributeError):
                where = f"{store.url}/{prefix}/{name}"
                raise CorruptArtifact(f"{where}: isn't the index of a rank's part of a state") from None

    def _add(self, folder: str, index: dict[str, Any]) -> None:
        """Add the parts in a rank's index. Raises ValueError and the like for an index of another form."""
        for part, entry in index["parts"].items():
            pieces = [Piece(*piece) for piece in entry["pieces"]]
            if any(type(each.start) is not int or type(each.numel) is not int for each in pieces):
                raise ValueError("a piece has no place")
            self.parts.append(StatePart(f"{folder}{part}", entry["record"], pieces))
            self.fingerprints.setdefault(entry["record"], 0)
        for kind, value in index["fingerprints"].items():
            self.fingerprints[kind] = (self.fingerprints[kind] + value) % 2**64

    def read(self, name: str) -> bytes:
        """A file of the state, verified."""
        where = f"{self._store.url}/{self._prefix}/{name}"
        if name not in self._files:
            raise CorruptArtifact(f"{where}: its manifest doesn't list it")
        try:
            return read_verified(self._store, f"{self._prefix}/{name}", self._files[name])
        except FileNotFoundError:
            raise CorruptArtifact(f"{where}: gone, though its manifest lists it") from None

    def tensors(self, part: StatePart) -> dict[str, Tensor]:
        """A part's pieces by key, verified."""
        try:
            return from_safetensors(self.read(part.name))
        except SafetensorError as error:
            raise CorruptArtifact(f"{self._store.url}/{self._prefix}/{part.name}: not safetensors: {error}") from None

    def _lacks(self, record: str, name: str) -> CorruptArtifact:
        return CorruptArtifact(f"{self._store.url}/{self._prefix}: not a state of this model, see {record} of {name}")

    def fill(self, held: list[Fragment]) -> None:
        """Copy the state's values of a rank's fragments into them.

        CorruptArtifact if the state lacks some: it is damaged, or that of another model.
        """
        fragments = {fragment.name: fragment for fragment in held}
        filled = {(record, name): 0 for name, fragment in fragments.items() for record in fragment.records}
        needed = [part for part in self.parts if any(_overlap(fragments, piece) for piece in part.pieces)]
        with ThreadPoolExecutor(READERS) as pool:
            for first in range(0, len(needed), READERS):  # only so many parts are in memory at once
                parts = needed[first : first + READERS]
                for part, tensors in zip(parts, pool.map(self.tensors, parts), strict=True):
                    for piece in part.pieces:
                        if fragment := _overlap(fragments, piece):
                            offset = fragment.start - piece.start
                            source = tensors[piece.key][offset : offset + fragment.numel]
                            if part.record not in fragment.records:
                                raise self._lacks(part.record, piece.name)
                            fragment.records[part.record].copy_(source)
                            filled[part.record, piece.name] += fragment.numel
        for (record, name), numel in filled.items():
            if numel != fragments[name].numel:
                raise self._lacks(record, name)

    def consolidated(
        self, record: str, shapes: dict[str, tuple[int, ...]], besides: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Iterator[bytes]:
        """A safetensors file of one record's parameters, then the tensors in `besides`, as chunks of bytes.

        Chunks are pieces, so that the file is never in memory as a whole. CorruptArtifact if an element is missing.
        """
        yield _safetensors_header(shapes | {name: tuple(value.shape) for name, value in besides.items()})
        holders: dict[str, list[tuple[Piece, StatePart]]] = {name: [] for name in shapes}
        for part in self.parts:
            for piece in part.pieces if part.record == record else ():
                holders.setdefault(piece.name, []).append((piece, part))
        # A parameter's pieces are in parts of several ranks: with one part a rank in memory each is read only once.
        ranks = len({part.name.partition("/")[0] for part in self.parts})
        parts = {part.name: part for part in self.parts}
        read = lru_cache(maxsize=ranks + 1)(lambda name: self.tensors(parts[name]))
        for name, shape in shapes.items():
            at = 0
            for piece, part in sorted(holders[name], key=lambda holder: holder[0].start):
                if piece.start == at:
                    values = read(part.name)[piece.key]
                    if not bool(torch.isfinite(values).all()):
                        where = f"{self._store.url}/{self._prefix}"
                        raise CorruptArtifact(f"{where}: {record} of {name} has numbers that aren't finite")
                    yield values.numpy().tobytes()
                    at += piece.numel
            if at != prod(shape):
                raise self._lacks(record, name)
        for value in besides.values():
            yield value.detach().float().cpu().contiguous().numpy().tobytes()


def _safetensors_header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Header of a safetensors file of fp32 tensors; their values follow it in this order."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _overlap(fragments: dict[str, Fragment], piece: Piece) -> Fragment | None:
    """Overlap of a piece with the fragment of its parameter; None if there is none."""
    fragment = fragments.get(piece.name)
    common = fragment.part(piece.start, piece.start + piece.numel) if fragment else None
    return common if common and common.numel else None


def fingerprints(owned: Iterable[Fragment]) -> Counter[str]:
    """The fingerprints of live fragments, by record (0 for others). The host waits for the device once."""
    prints: dict[str, list[Tensor]] = {}
    for each in owned:
        for record, values in each.records.items():
            prints.setdefault(record, []).append(fingerprint(Piece(each.name, each.start, each.numel), values))
    if not prints:
        return Counter()
    totals_R = torch.stack([torch.stack(ones).sum() for ones in prints.values()])
    return Counter({record: total % 2**64 for record, total in zip(prints, totals_R.cpu().tolist(), strict=True)})


def curve_bytes(curve: Mapping[str, Sequence[float]]) -> bytes:
    """Each step's loss, gradient norm and so on, from the first step on, as safetensors of float64."""
    return to_safetensors({name: torch.tensor(values, dtype=torch.float64) for name, values in curve.items()})


def read_curve(data: bytes) -> dict[str, list[float]]:
    """Read what `curve_bytes` wrote, as lists."""
    return {name: values.tolist() for name, values in from_safetensors(data).items()}
