"""A sharded stage that knows nothing of images: squares of numbers, whatever stops it on its way."""

import json
import pickle
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ddm_ray.config import load_recipe
from ddm_ray.data.sharded.chunk_store import HASH, ChunkRecord, ChunkStore, Hashes, StoredFile
from ddm_ray.data.sharded.ray_data import _Finish, _read, from_row
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.sharded.stage import ShareRead, ShareReporter, make_chunks
from ddm_ray.data.sharded.work import Chunk, FinishedChunk, Task
from ddm_ray.errors import CorruptArtifact, DataError
from ddm_ray.run.chunk_records import PLAN, RECORDS, ChunkKey
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run

SQUARES = Artifact("eval/squares")


@dataclass(frozen=True)
class Range:
    key: str
    first: int
    last: int

    @property
    def bytes(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class RangePlan:
    units: tuple[Range, ...]
    power: int


@dataclass(frozen=True)
class PowersRecord(ChunkRecord):
    total: int
    file: StoredFile | None
    hashes_N: Hashes


Store = ChunkStore[RangePlan, PowersRecord]
UNITS = (Range("low", 0, 10), Range("none", 10, 10), Range("high", 10, 23))


def read(unit: Range, skip: Container[int]) -> Iterator[Chunk[np.ndarray]]:
    """Four numbers a chunk; a unit of none has one chunk."""
    starts = range(unit.first, max(unit.last, unit.first + 1), 4)
    for number, start in enumerate(starts):
        if number not in skip:
            stop = min(start + 4, unit.last)
            yield Chunk(
                number, np.arange(start, stop), 1.0 if number == len(starts) - 1 else (number + 1) / len(starts)
            )


@dataclass(frozen=True)
class MakePowers:
    chunks: Store
    broken: int | None = None

    def load(self) -> Callable[[np.ndarray], np.ndarray]:
        return self._powers

    def _powers(self, number_N: np.ndarray) -> np.ndarray:
        if self.broken in number_N.tolist():
            raise DataError(f"{self.broken} has no square")
        return number_N**2

    def store(self, key: ChunkKey, square_N: np.ndarray) -> PowersRecord:
        file = (
            self.chunks.put(key, "powers/", ".json", json.dumps(square_N.tolist()).encode()) if len(square_N) else None
        )
        return self.chunks.finish(PowersRecord(key, int(square_N.sum()), file, square_N.astype(HASH)))


class Watched:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.before: list[ChunkKey] = []
        self.during: list[tuple[ChunkKey, float]] = []

    def begin(self, records: Sequence[PowersRecord]) -> None:
        self.before = [record.key for record in records]

    def add(self, record: PowersRecord, until: float) -> None:
        self.during.append((record.key, until))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny"))
    return ChunkStore(run, SQUARES, RangePlan, PowersRecord)


def make(store: Store, execute=serial, broken: int | None = None) -> tuple[list[PowersRecord], Watched]:
    plan, watched = store.plan(lambda: RangePlan(UNITS, 2)), Watched()
    return list(make_chunks(store, plan, execute, read, MakePowers(store, broken), watched)), watched


def values(store: Store, records: list[PowersRecord]) -> list[int]:
    return [value for record in records if record.file for value in json.loads(store.read(record, record.file[0]))]


def test_all_chunks_are_made_in_the_plans_order(store: Store) -> None:
    records, watched = make(store)
    assert values(store, records) == [number**2 for number in range(23)]
    assert [record.key for record in records] == store.finished_keys() == [key for key, _ in watched.during]
    assert np.concatenate([record.hashes_N for record in records]).tolist() == values(store, records)
    assert [until for key, until in watched.during if key.unit == 1] == [1.0]
    assert store.begun() == RangePlan(UNITS, 2)


def test_a_stopped_stage_goes_on_with_what_is_missing(store: Store) -> None:
    def stopped(*arguments) -> Iterator[FinishedChunk]:
        yield from islice(serial(*arguments), 4)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(store, stopped)
    first = store.finished_keys()
    store.store.delete_one(f"{SQUARES}/{RECORDS}/{first[1].record_name}")
    records, watched = make(store)
    assert watched.before == [first[0], *first[2:]]
    assert len(watched.during) == 8 - 3
    assert values(store, records) == [number**2 for number in range(23)]
    again, _ = make(store, lambda *_: pytest.fail("nothing is missing"))
    assert [record.files for record in again] == [record.files for record in records]


def test_chunks_that_another_process_finishes_meanwhile_count(store: Store) -> None:
    def late(*arguments) -> Iterator[FinishedChunk]:
        make(ChunkStore(store.run, SQUARES, RangePlan, PowersRecord))
        yield from islice(serial(*arguments), 2)

    records, _ = make(store, late)
    assert values(store, records) == [number**2 for number in range(23)]
    store.delete_strays(records)
    names = {name for record in records for name in record.files}
    assert {name for name in store.store.sizes(SQUARES) if name.startswith("powers/")} == names


def test_strays_are_files_that_no_record_names(store: Store) -> None:
    records, _ = make(store)
    before = set(store.store.sizes(SQUARES))
    key = ChunkKey(0, 1, False)
    late = MakePowers(store).store(key, np.array([9]))
    assert (late.total, late.files) == (records[1].total, records[1].files)
    store.put(key, "powers/", ".json", b"killed before its record")
    store.delete_strays(records)
    assert set(store.store.sizes(SQUARES)) == before


def test_records_and_plans_of_another_stage_are_refused(store: Store) -> None:
    records, _ = make(store)

    @dataclass(frozen=True)
    class OtherPlan:
        units: tuple[Range, ...]
        source: str

    @dataclass(frozen=True)
    class OtherRecord(ChunkRecord):
        rows: int

    other = ChunkStore(store.run, SQUARES, OtherPlan, OtherRecord)
    with pytest.raises(CorruptArtifact, match=f"{PLAN}: is the plan of something else; delete"):
        other.begun()
    with pytest.raises(CorruptArtifact, match=r"000000-000000\.json: is the record of something else; delete /"):
        other.record(records[0].key)


def test_what_ray_runs_gives_the_same_and_passes_on_errors(store: Store) -> None:
    """The functions of tasks and actors, without a cluster; what they are given and give can be pickled."""
    tasks = [Task(0, UNITS[0], frozenset({1})), Task(2, UNITS[2], frozenset())]
    table = pa.table({"task": [pickle.dumps(task) for task in tasks]})
    rows = list(pickle.loads(pickle.dumps(partial(_read, read=read)))(table))
    assert all(row.num_rows == 1 for row in rows)
    finish = _Finish(pickle.loads(pickle.dumps(MakePowers(store, broken=17))))
    done = [from_row(finish(row)) for row in rows]
    assert [(chunk.record.key.unit, chunk.record.key.chunk) for chunk in done[:3]] == [(0, 0), (0, 2), (2, 0)]
    assert [str(error) for error in done if isinstance(error, DataError)] == ["17 has no square"]
    assert [chunk.record.files for chunk in done[:3]] == [store.record(chunk.record.key).files for chunk in done[:3]]

    def lost(unit: Range, skip: Container[int]) -> Iterator[Chunk[np.ndarray]]:
        yield from islice(read(unit, skip), 1)
        raise DataError("the disk is gone")

    *_, last = _read(table, lost)
    error = from_row(finish(last))
    assert isinstance(error, DataError) and str(error) == "the disk is gone"


def test_an_observer_ends_the_stage(store: Store) -> None:
    class Strict(Watched):
        def add(self, record: PowersRecord, until: float) -> None:
            raise DataError("too many")

    plan = store.plan(lambda: RangePlan(UNITS, 2))
    with pytest.raises(DataError, match="too many"):
        make_chunks(store, plan, serial, read, MakePowers(store), Strict())
    assert len(store.finished_keys()) == 1


def test_the_share_that_is_read_is_by_size(store: Store) -> None:
    records, _ = make(store)
    share = ShareRead[PowersRecord](UNITS)
    share.begin(records[:4])  # the first unit and the empty one
    assert share.fraction == pytest.approx((10 + 1) / 24)
    share.advance(2, 0.5)
    share.advance(2, 0.25)
    assert share.fraction == pytest.approx((10 + 1 + 6.5) / 24)
    assert share.expected(35) == pytest.approx(48)
    assert ShareRead[PowersRecord](UNITS).expected(35) == np.inf


def test_parts_of_a_chunk_are_reported_and_shares_only_grow(store: Store) -> None:
    records, _ = make(store)
    shares: list[float] = []
    reporter = ShareReporter[PowersRecord](UNITS, lambda share, note: shares.append(share), "powers")
    reporter.begin(records[:4])
    reporter.partly(UNITS[2], 0.5)
    reporter.partly(UNITS[2], 0.25)
    reporter.partly(UNITS[2], 1.0)
    assert shares == pytest.approx([11 / 24, 17.5 / 24, 17.5 / 24, 0.99])
    reporter.add(next(record for record in records if record.key.unit == 2), 1.0)
    assert shares[-1] == 0.99
