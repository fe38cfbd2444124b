"""Records of an artifact that is made chunk by chunk. Their file names are enough to tell which chunks are done."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from ddm_ray.errors import CorruptArtifact
from ddm_ray.store.checksummed import read_sealed, unseal
from ddm_ray.store.store import Store

PLAN = "_plan/PLAN.json"
RECORDS = "_parts"
_NAME = re.compile(r"([0-9]{6,12})-([0-9]{6,12})(-last)?\.json")
_FILE = re.compile(r"(?:.*[-/])?([0-9]{6,12}-[0-9]{6,12})-[0-9a-f]{8}\.\w+")


@dataclass(frozen=True, order=True, slots=True)
class ChunkKey:
    """Key of a chunk: the number of its unit in the plan, its number within the unit, and whether it is the `last`."""

    unit: int
    chunk: int
    last: bool

    @property
    def stem(self) -> str:
        """The common part of the names of the chunk's files. Sorted stems are in the plan's order."""
        return f"{self.unit:06d}-{self.chunk:06d}"

    @property
    def record_name(self) -> str:
        """File name of the chunk's record."""
        return f"{self.stem}{'-last' if self.last else ''}.json"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The key in a record's file name; None for other files."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2]), match[3] is not None) if match else None


def stem_of_file(name: str) -> str | None:
    """The stem of the chunk that a file of this name belongs to; None for other files."""
    match = _FILE.fullmatch(name)
    return match[1] if match else None


def recorded_keys(store: Store, artifact: str) -> list[ChunkKey]:
    """The keys of all recorded chunks, in the plan's order."""
    return sorted(key for name in store.sizes(f"{artifact}/{RECORDS}") if (key := ChunkKey.parse(name)))


def chunks_done(keys: Iterable[ChunkKey]) -> tuple[dict[int, set[int]], set[int]]:
    """Numbers of recorded chunks by unit, and the units that are recorded completely."""
    chunks: dict[int, set[int]] = {}
    lengths: dict[int, int] = {}
    for key in keys:
        chunks.setdefault(key.unit, set()).add(key.chunk)
        if key.last:
            lengths[key.unit] = key.chunk + 1
    return chunks, {unit for unit, length in lengths.items() if len(chunks[unit]) == length}


@dataclass(frozen=True)
class ChunksProgress:
    """Progress of an artifact that has begun: all units of work, units done, chunks recorded."""

    units: int
    units_done: int
    chunks: int


def chunks_progress(store: Store, artifact: str) -> ChunksProgress | None:
    """The progress of an artifact; None if it hasn't begun. Raises CorruptArtifact for a damaged plan."""
    try:
        plan = unseal(read_sealed(store, f"{artifact}/{PLAN}"), f"{store.url}/{artifact}/{PLAN}", ["units"])
    except FileNotFoundError:
        return None
    if type(plan["units"]) is not int or not 0 <= plan["units"] < 2**53:
        raise CorruptArtifact(f"{store.url}/{artifact}/{PLAN}: its number of units is none")
    keys = recorded_keys(store, artifact)
    return ChunksProgress(plan["units"], len(chunks_done(keys)[1]), len(keys))
