"""The driver of a sharded stage: finds the missing chunks, has them made, and collects the records of all."""

import math
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from ddm_ray.data import OnProgress
from ddm_ray.data.sharded.chunk_store import ChunkRecord, ChunkStore, PlanT, RecordT, WorkUnit
from ddm_ray.data.sharded.kept_records import KeptRecords
from ddm_ray.data.sharded.work import ChunkMaker, Executor, ReadUnit, Task
from ddm_ray.run.chunk_records import chunks_done

SeenT = TypeVar("SeenT", bound=ChunkRecord, contravariant=True)


class ChunkObserver(Protocol[SeenT]):
    """Is notified of every finished chunk, and may end the stage by raising a DDMError."""

    def begin(self, records: Collection[SeenT]) -> None:
        """Start with the records of finished chunks. The collection grows as chunks are finished."""
        ...

    def add(self, record: SeenT, until: float) -> None:
        """One more chunk is finished; its unit is read up to the share `until`."""
        ...


def make_chunks(
    chunks: ChunkStore[PlanT, RecordT],
    plan: PlanT,
    execute: Executor[RecordT],
    read: ReadUnit,
    maker: ChunkMaker[Any, RecordT],
    observer: ChunkObserver[RecordT],
) -> KeptRecords[RecordT]:
    """Make all chunks without a record, and return the records of all chunks, in the plan's order.

    Raises CorruptArtifact if a chunk has no record or a file is missing, besides what the executor raises.
    """
    records = KeptRecords.of(chunks)
    observer.begin(records)
    done, complete_units = chunks_done(records.keys)
    units = ((number, unit) for number, unit in enumerate(plan.units) if number not in complete_units)
    if tasks := [Task(number, unit, frozenset(done.get(number, ()))) for number, unit in units]:
        # Closed also if the observer raises, so that no work of the executor is left running.
        with closing(execute(read, maker, tasks)) as finished:
            for chunk in finished:
                records.add(chunk.record)
                observer.add(chunk.record, chunk.until)
    # Chunks of a concurrent command, or of a killed one that returned no results.
    records.read(chunks, [key for key in chunks.finished_keys() if key not in records.keys])
    chunks.require_complete(plan, records)
    return records


class ShareRead(Generic[RecordT]):
    """The share of all units that is read, weighted by their sizes."""

    def __init__(self, units: Sequence[WorkUnit]):
        self._sizes = [max(1, unit.bytes) for unit in units]
        self._total = sum(self._sizes)
        self._until: dict[int, float] = {}
        self._read = 0.0
        self._began: tuple[float, int] | None = None

    def begin(self, records: Collection[RecordT]) -> None:
        """Count the units finished before. The read share of an incomplete unit is unknown, and counts as 0."""
        for unit in chunks_done(record.key for record in records)[1]:
            self.advance(unit, 1.0)

    def advance(self, unit: int, until: float) -> None:
        """Unit number `unit` is read up to the share `until`."""
        before = self._until.get(unit, 0.0)
        if until > before:
            self._until[unit] = until
            self._read += self._sizes[unit] * (until - before)

    @property
    def fraction(self) -> float:
        """The share, 0 to 0.99."""
        return min(0.99, self._read / self._total)

    def rate(self, rows: int) -> str:
        """Describe the rate at which `rows`, those so far, were made: `, 100 rows/s`.

        The clock starts at the first call, since processes start and networks load before. That call returns "".
        """
        now = time.monotonic()
        self._began = self._began or (now, rows)
        began, before = self._began
        return f", {(rows - before) / (now - began):.0f} rows/s" if rows > before and now > began else ""

    def expected(self, rows: int) -> float:
        """The approximate number of rows in total, given that the share read so far had `rows`."""
        return rows / self.fraction if self.fraction else math.inf


class ShareReporter(ShareRead[RecordT]):
    """An observer that reports the share at the beginning and after each chunk, with fixed words."""

    def __init__(self, units: Sequence[WorkUnit], on_progress: OnProgress, words: str):
        super().__init__(units)
        self._on_progress, self._words = on_progress, words
        self._numbers = {unit.key: number for number, unit in enumerate(units)}
        self._lock = Lock()

    def begin(self, records: Collection[RecordT]) -> None:
        """See ChunkObserver."""
        super().begin(records)
        self._on_progress(self.fraction, self._words)

    def add(self, record: RecordT, until: float) -> None:
        """See ChunkObserver."""
        self._advance(record.key.unit, until)

    def partly(self, unit: WorkUnit, share: float) -> None:
        """Report that a share of a unit is made, before its chunk is finished. Any thread may call it."""
        self._advance(self._numbers[unit.key], min(0.99, share))

    def _advance(self, unit: int, until: float) -> None:
        with self._lock:  # one report at a time, so that shares only grow
            self.advance(unit, until)
            self._on_progress(self.fraction, self._words)
