"""The work of a sharded stage as processes do it: units are read as chunks, and a chunk is made into its record.

A stage supplies two objects that can be pickled: a `ReadUnit`, for processes that load little, and a `ChunkMaker`, for
those that hold networks.
"""

from collections.abc import Callable, Container, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ddm_ray.data.sharded.chunk_store import ChunkStore, RecordT
from ddm_ray.run.chunk_records import ChunkKey

CHUNK_BYTES = 64 * 2**20
"""Size of a chunk's rows in memory that stages aim at."""

UnitT = TypeVar("UnitT")
RowsT = TypeVar("RowsT")
InRowsT = TypeVar("InRowsT", contravariant=True)


@dataclass(frozen=True)
class Chunk(Generic[RowsT]):
    """Rows of a unit, numbered from 0. `until`: the share of the unit that is read by now, 1.0 for the last alone."""

    number: int
    rows: RowsT
    until: float

    def key(self, unit: int) -> ChunkKey:
        """The chunk's key, `unit` being its unit's number in the plan."""
        return ChunkKey(unit, self.number, self.until == 1.0)


@dataclass(frozen=True)
class Task(Generic[UnitT]):
    """A unit, by its number in the plan, some of whose chunks are missing; `done`: the numbers of the others."""

    number: int
    unit: UnitT
    done: frozenset[int]


@dataclass(frozen=True)
class FinishedChunk(Generic[RecordT]):
    """A chunk's record, and the share of its unit that is read after it."""

    record: RecordT
    until: float


ReadUnit = Callable[[Any, Container[int]], Iterator[Chunk[Any]]]
"""The unit's chunks but those to skip, in order; the same every time, whatever is skipped. Raises DDMError."""


def read_whole(unit: UnitT, done: Container[int]) -> Iterator[Chunk[UnitT]]:
    """The `ReadUnit` of units that say all that there is to know: the unit is its only chunk."""
    if 0 not in done:
        yield Chunk(0, unit, 1.0)


class ChunkMaker(Protocol[InRowsT, RecordT]):
    """Makes chunks into files and records."""

    @property
    def chunks(self) -> ChunkStore[Any, RecordT]:
        """Store of the files and records."""
        ...

    def load(self) -> Callable[[InRowsT], Any]:
        """Load what rows are made with (networks), once a process; gives the function that makes them."""
        ...

    def store(self, key: ChunkKey, made: Any, /) -> RecordT:
        """Write the files of what that function made, then the chunk's record; the record that counts."""
        ...


Executor = Callable[
    [ReadUnit, ChunkMaker[Any, RecordT], Sequence[Task[Any]]],
    Generator[FinishedChunk[RecordT], None, None],
]
"""Makes all chunks of the tasks that aren't done, and yields each when it is recorded. Raises DDMError."""


class FinishChunks(Generic[RowsT, RecordT]):
    """Finishes chunks in one process, `at_once` of them side by side; more calls may overlap: they read and store."""

    def __init__(self, maker: ChunkMaker[RowsT, RecordT], at_once: int = 1):
        self._maker = maker
        # Of the networks: loads them while the first chunk is read, then makes chunks.
        self._threads = ThreadPoolExecutor(at_once)
        self._make = self._threads.submit(maker.load)

    def __call__(self, unit: int, chunk: Chunk[RowsT]) -> FinishedChunk[RecordT]:
        """Make a chunk of unit number `unit`; one that has a record is left alone. Raises DDMError."""
        key = chunk.key(unit)
        if self._maker.chunks.has(key):
            return FinishedChunk(self._maker.chunks.record(key), chunk.until)
        made = self._threads.submit(self._make.result(), chunk.rows).result()
        return FinishedChunk(self._maker.store(key, made), chunk.until)
