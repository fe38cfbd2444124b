"""Records of a stage are on the disk: a driver has their keys alone in memory, and what it needs of one at a time."""

import errno
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from ddm_ray.config import load_recipe
from ddm_ray.data import no_progress
from ddm_ray.data.prepare import finalize, repeated
from ddm_ray.data.prepare.finalize import check_rejected, commit
from ddm_ray.data.prepare.records import RowsRecord, RowsStore, SourcePlan, rows_store
from ddm_ray.data.prepare.repeated import values_that_repeat
from ddm_ray.data.prepare.stage import _Observer
from ddm_ray.data.sharded.kept_records import KeptRecords
from ddm_ray.data.sharded.stage import make_chunks
from ddm_ray.data.sharded.work import FinishedChunk
from ddm_ray.data.sources import Unit
from ddm_ray.errors import StorageError
from ddm_ray.run.chunk_records import ChunkKey
from ddm_ray.run.graph import ROWS
from ddm_ray.run.run import Run
from ddm_ray.store.checksummed import canonical, digest_of_list, sha256

pytestmark = pytest.mark.contract

PARTS, ROWS_OF_A_PART = 200, 64


def recorded(chunks: RowsStore, number: int, rows: int = ROWS_OF_A_PART) -> RowsRecord:
    """A chunk of its own unit that is stored, with a file in place of its part."""
    key, random = ChunkKey(number, 0, True), np.random.default_rng(number)
    hash_2N = random.integers(0, 2**64, (2, rows), dtype=np.uint64)
    part = chunks.put(key, "part-", ".parquet", b"%d" % number)
    reasons = [{"id": f"{number}", "reason": f"torn at {number}", "rows": 1}] if number % 7 == 0 else []
    record = RowsRecord(
        key=key,
        rows=rows,
        heldout=number % 3,
        rejected=len(reasons),
        embedding_dim=8,
        digest=sha256(b"%d" % number),
        part=part,
        reasons=None,
        commonest=reasons,
        id_hashes_N=hash_2N[0],
        content_hashes_N=hash_2N[1],
    )
    return chunks.finish(record)


def begin(path: Path) -> tuple[RowsStore, SourcePlan]:
    chunks = rows_store(Run.create(str(path / "run"), load_recipe("tiny")), ROWS)
    units = tuple(Unit(str(number), 1) for number in range(PARTS))
    return chunks, chunks.plan(lambda: SourcePlan("tables", ROWS_OF_A_PART, None, units))


def as_json(record: RowsRecord) -> bytes:
    return TypeAdapter(RowsRecord).dump_json(record)


def test_they_come_back_in_the_plans_order_however_they_came(tmp_path: Path) -> None:
    chunks, _ = begin(tmp_path)
    every, kept = [recorded(chunks, number) for number in range(PARTS)], KeptRecords[RowsRecord]()
    assert (len(kept), [*kept]) == (0, [])
    for number in np.random.default_rng(0).permutation(PARTS).tolist():
        kept.add(every[number])
        assert every[number] in kept and [record.key for record in kept] == sorted(kept.keys)
    for _ in range(2):
        assert list(map(as_json, kept)) == list(map(as_json, every))
    assert [record.files for record in KeptRecords.of(chunks)] == [record.files for record in every]
    assert recorded(chunks, PARTS) not in kept


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    for what in (KeptRecords[RowsRecord], lambda: values_that_repeat([np.zeros(3, np.uint64)])):
        with pytest.raises(StorageError) as refused:
            what()
        assert str(refused.value).startswith(f"{tempfile.gettempdir()}: ") and "TMPDIR" in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.chaos
def test_a_driver_holds_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parts of sixteen times the rows take no more memory, from the first record to the manifest."""
    monkeypatch.setattr(finalize, "networks_of", lambda *_: {})
    monkeypatch.setattr(repeated, "AT_ONCE", 4096)
    peaks = [_peak_of_a_driver(tmp_path / str(rows), rows) for rows in (64, 64, 1024)]
    hashes = PARTS * 1024 * 16
    assert peaks[2] - peaks[1] < hashes / 4, "bytes; the first run loads modules"


def _peak_of_a_driver(path: Path, rows: int) -> int:
    chunks, plan = begin(path)
    for number in range(0, PARTS, 2):
        recorded(chunks, number, rows)  # of a killed command

    def execute(*_: object) -> Iterator[FinishedChunk[RowsRecord]]:
        for number in range(1, PARTS, 2):
            yield FinishedChunk(recorded(chunks, number, rows), 1.0)

    tracemalloc.start()
    records = make_chunks(chunks, plan, execute, None, None, _Observer(chunks, plan, no_progress, 0.05))  # type: ignore[arg-type]
    check_rejected(chunks, plan, records, 0.05)
    assert commit(chunks, plan, records).info["rows"] == PARTS * rows
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@settings(deadline=None)
@given(
    parts=st.lists(
        st.lists(st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63, 2**64 - 1]), max_size=9), max_size=9
    ),
    at_once=st.integers(1, 20),
)
def test_values_that_come_more_than_once(parts: list[list[int]], at_once: int) -> None:
    """Whatever range they fall into, the ends of all included."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(repeated, "AT_ONCE", at_once)
        repeating = values_that_repeat(np.array(part, np.uint64) for part in parts)
    every = [value for part in parts for value in part]
    assert repeating.tolist() == sorted({value for value in every if every.count(value) > 1})
    assert repeating.dtype == np.uint64


@given(st.lists(st.text(max_size=5), max_size=5))
def test_the_digest_of_a_list_is_that_of_its_canonical_form(texts: list[str]) -> None:
    assert digest_of_list(iter(texts)) == sha256(canonical(texts))
