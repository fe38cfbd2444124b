"""The driver of a sharded stage: which chunks are missing, their making, and the records of all."""

import math
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from typing import Any, Generic, Protocol, TypeVar

from ddm_ray.data import OnProgress
from ddm_ray.data.sharded.chunk_store import ChunkRecord, ChunkStore, PlanT, RecordT, WorkUnit
from ddm_ray.data.sharded.kept_records import KeptRecords
from ddm_ray.data.sharded.work import ChunkMaker, Executor, ReadUnit, Task
from ddm_ray.run.chunk_records import chunks_done

SeenT = TypeVar("SeenT", bound=ChunkRecord, contravariant=True)


class ChunkObserver(Protocol[SeenT]):
    """Hears of every finished chunk, and may end the stage by raising a DDMError."""

    def begin(self, records: Collection[SeenT]) -> None:
        """The chunks that were finished before; later on these are all that are finished by then."""
        ...

    def add(self, record: SeenT, until: float) -> None:
        """One more chunk is finished, up to which the share `until` of its unit is read."""
        ...


def make_chunks(
    chunks: ChunkStore[PlanT, RecordT],
    plan: PlanT,
    execute: Executor[RecordT],
    read: ReadUnit,
    maker: ChunkMaker[Any, RecordT],
    observer: ChunkObserver[RecordT],
) -> KeptRecords[RecordT]:
    """Make all chunks that have no record, and return the records of all, in the plan's order."""
    records = KeptRecords.of(chunks)
    observer.begin(records)
    done, complete_units = chunks_done(records.keys)
    units = ((number, unit) for number, unit in enumerate(plan.units) if number not in complete_units)
    if tasks := [Task(number, unit, frozenset(done.get(number, ()))) for number, unit in units]:
        # Closed also where the observer raises, so that nothing of an executor is left running.
        with closing(execute(read, maker, tasks)) as finished:
            for chunk in finished:
                records.add(chunk.record)
                observer.add(chunk.record, chunk.until)
    # Of a concurrent command, or of one that was killed before its result came here.
    records.read(chunks, [key for key in chunks.finished_keys() if key not in records.keys])
    return records


class ShareRead(Generic[RecordT]):
    """The share of all units that is read, by their sizes."""

    def __init__(self, units: Sequence[WorkUnit]):
        self._sizes = [max(1, unit.bytes) for unit in units]
        self._total = sum(self._sizes)
        self._until: dict[int, float] = {}
        self._read = 0.0
        self._began: tuple[float, float, int] | None = None

    def begin(self, records: Collection[RecordT]) -> None:
        """The chunks that were finished before; of a unit that isn't whole its share is unknown and not counted."""
        for unit in chunks_done(record.key for record in records)[1]:
            self.advance(unit, 1.0)

    def advance(self, unit: int, until: float) -> None:
        """The share `until` of unit number `unit` is read."""
        before = self._until.get(unit, 0.0)
        if until > before:
            self._until[unit] = until
            self._read += self._sizes[unit] * (until - before)

    @property
    def fraction(self) -> float:
        """The share, 0 to 0.99."""
        return min(0.99, self._read / self._total)

    def left(self, rows: int = 0) -> str:
        """Words on the time left at the pace so far, `, 12 s left`; empty before the second call, from whose first on
        it counts: until then processes were started and networks loaded. With `rows`, those so far, also on their rate:
        `, 100 rows/s, 12 s left`.
        """
        now = time.monotonic(), self.fraction, rows
        self._began = self._began or now
        seconds, share, more = (value - first for value, first in zip(now, self._began, strict=True))
        if seconds <= 0 or share <= 0:
            return ""
        rate = f", {more / seconds:.0f} rows/s" if rows else ""
        return f"{rate}, {seconds * (1 - self.fraction) / share:.0f} s left"

    def expected(self, rows: int) -> float:
        """About how many rows there will be, `rows` being those of the share that is read."""
        return rows / self.fraction if self.fraction else math.inf


class ShareTold(ShareRead[RecordT]):
    """An observer that tells the share after each chunk, with the same words and the time left."""

    def __init__(self, units: Sequence[WorkUnit], on_progress: OnProgress, words: str):
        super().__init__(units)
        self._on_progress, self._words = on_progress, words

    def add(self, record: RecordT, until: float) -> None:
        """See ChunkObserver."""
        self.advance(record.key.unit, until)
        self._on_progress(self.fraction, self._words + self.left())
