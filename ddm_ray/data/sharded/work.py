"""The work of a sharded stage in its processes: units are read as chunks, and each chunk is made into its record.

A stage supplies two objects that can be pickled: a `ReadUnit`, for processes that load little, and a `ChunkMaker`, for
processes that hold networks.
"""

from collections.abc import Callable, Container, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ddm_ray.data.sharded.chunk_store import ChunkStore, RecordT
from ddm_ray.run.chunk_records import ChunkKey

CHUNK_BYTES = 64 * 2**20
"""Target size of a chunk's rows in memory."""

UnitT = TypeVar("UnitT")
RowsT = TypeVar("RowsT")
InRowsT = TypeVar("InRowsT", contravariant=True)


@dataclass(frozen=True)
class Chunk(Generic[RowsT]):
    """Rows of a unit, numbered from 0. `until`: the share of the unit read so far; 1.0 only for the last chunk."""

    number: int
    rows: RowsT
    until: float

    def key(self, unit: int) -> ChunkKey:
        """The chunk's key. `unit`: its unit's number in the plan."""
        return ChunkKey(unit, self.number, self.until == 1.0)


@dataclass(frozen=True)
class Task(Generic[UnitT]):
    """A unit with missing chunks, by its number in the plan. `done`: the numbers of its finished chunks."""

    number: int
    unit: UnitT
    done: frozenset[int]


@dataclass(frozen=True)
class FinishedChunk(Generic[RecordT]):
    """A chunk's record, and the share of its unit that is read after it."""

    record: RecordT
    until: float


ReadUnit = Callable[[Any, Container[int]], Iterator[Chunk[Any]]]
"""Yields the unit's chunks except those to skip, in order; always the same ones. Raises DDMError."""


def read_whole(unit: UnitT, done: Container[int]) -> Iterator[Chunk[UnitT]]:
    """The `ReadUnit` of self-contained units: the unit itself is its only chunk."""
    if 0 not in done:
        yield Chunk(0, unit, 1.0)


class ChunkMaker(Protocol[InRowsT, RecordT]):
    """Makes chunks into files and records."""

    @property
    def chunks(self) -> ChunkStore[Any, RecordT]:
        """Store of the files and records."""
        ...

    def load(self) -> Callable[[InRowsT], Any]:
        """Load what chunks are made with, such as networks, once per process; returns the function that makes them."""
        ...

    def store(self, key: ChunkKey, made: Any, /) -> RecordT:
        """Write the files of that function's result, then the chunk's record; returns the valid record."""
        ...


Executor = Callable[
    [ReadUnit, ChunkMaker[Any, RecordT], Sequence[Task[Any]]],
    Generator[FinishedChunk[RecordT], None, None],
]
"""Makes all missing chunks of the tasks, and yields each once it is recorded. Raises DDMError."""


class FinishChunks(Generic[RowsT, RecordT]):
    """Finishes chunks in one process, making `at_once` of them at a time. More calls may overlap, to read and store."""

    def __init__(self, maker: ChunkMaker[RowsT, RecordT], at_once: int = 1):
        self._maker = maker
        # These threads use the networks: they load them while the first chunk is read, then make chunks.
        self._threads = ThreadPoolExecutor(at_once)
        self._make = self._threads.submit(maker.load)

    def __call__(self, unit: int, chunk: Chunk[RowsT]) -> FinishedChunk[RecordT]:
        """Make a chunk of unit number `unit`, unless it has a record. Raises DDMError."""
        key = chunk.key(unit)
        if self._maker.chunks.has(key):
            return FinishedChunk(self._maker.chunks.record(key), chunk.until)
        made = self._threads.submit(self._make.result(), chunk.rows).result()
        return FinishedChunk(self._maker.store(key, made), chunk.until)
