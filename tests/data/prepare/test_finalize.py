"""What is looked at before rows are committed: files of other kinds, rejected rows, ids and images that come twice."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.cli.data import _show_rows
from ddm_ray.cli.short_status import Line
from ddm_ray.config import load_recipe
from ddm_ray.data.images import png
from ddm_ray.data.prepare import finalize
from ddm_ray.data.prepare.finalize import check_rejected, commit
from ddm_ray.data.prepare.records import EmbeddedRows, RowsStore, SourcePlan, rows_store, store_rows
from ddm_ray.data.prepare.stage import list_source, prepare
from ddm_ray.data.schema import DUPLICATES
from ddm_ray.data.sharded.kept_records import KeptRecords
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.sources import open_source
from ddm_ray.errors import DataError
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.status import status
from ddm_ray.run.chunk_records import ChunkKey
from ddm_ray.run.graph import ROWS, owner_rows
from ddm_ray.run.run import Run
from tests.data.rows import commit_tables, table

pytestmark = pytest.mark.contract


def tiny(folder: Path, *settings: str) -> Run:
    return Run.create(str(folder / "run"), load_recipe("tiny", settings))


@pytest.fixture
def chunks(tmp_path: Path) -> RowsStore:
    return rows_store(tiny(tmp_path), ROWS)


def begin(chunks: RowsStore) -> SourcePlan:
    source = open_source(chunks.run.config.data, chunk_rows=100)
    return chunks.plan(lambda: list_source(chunks.run.config, "digits", source, 100))


def test_equal_images_are_counted_or_left_out(tmp_path: Path) -> None:
    for choice in ("keep", "drop"):
        run = tiny(tmp_path / choice, f"data.duplicates={choice}")
        held = table(run, "e", "f", contents=["x", "w"], split="heldout")
        tables = [table(run, "a", "b", contents=["x", "y"]), table(run, "c", "d", contents=["z", "x"]), held]
        manifest = commit_tables(run, tables)
        assert manifest.info["duplicates"] == 2
        names = ("rows", "rows_train", "rows_heldout", "dropped")
        assert [manifest.info[name] for name in names] == ([6, 4, 2, 0] if choice == "keep" else [4, 3, 1, 2])
        assert (DUPLICATES in manifest.files) is (choice == "drop")
        if choice == "drop":
            left_out = pq.read_table(f"{run.url}/{ROWS}/{DUPLICATES}")["id"].to_pylist()
            assert left_out == ["d", "e"]


@given(st.lists(st.lists(st.integers(0, 12), max_size=6), max_size=6))
def test_rows_that_share_a_hash_with_another_are_suspects_wherever_it_is(parts: list[list[int]]) -> None:
    """Also in the same part, at both ends of all hashes, and where there are none."""
    hashes: list[Any] = [np.array(part, np.uint64) * np.uint64(2**60) for part in parts]
    counted = Counter(value for part in hashes for value in part.tolist())
    expected = [[counted[value] > 1 for value in part.tolist()] for part in hashes]
    found_rows = finalize._sharing(hashes, lambda part: part)  # type: ignore[arg-type, return-value]
    assert [own.rows_N.tolist() for own in found_rows] == [rows for rows in expected if any(rows)]


def test_an_id_that_comes_twice_is_refused_by_name(chunks: RowsStore) -> None:
    with pytest.raises(DataError, match=r"source tables: 1 ids come twice, e.g. b; give each row its own"):
        commit_tables(chunks.run, [table(chunks.run, "a", "b"), table(chunks.run, "c", "b")])
    assert chunks.run.finished(ROWS) is None


def test_a_clash_of_hashes_is_no_clash_of_ids(chunks: RowsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddm_ray.data.prepare.records.shuffle_keys", lambda ids: np.full(len(ids), 7, np.uint64))
    assert commit_tables(chunks.run, [table(chunks.run, "a", "b"), table(chunks.run, "c")]).info["rows"] == 3


def test_rows_that_are_all_held_out_are_refused(chunks: RowsStore) -> None:
    with pytest.raises(DataError, match=r"no row to train on: 2 can be used and data.heldout is 0.1"):
        commit_tables(chunks.run, [table(chunks.run, "a", "b", split="heldout")])


def test_the_share_of_rejected_rows_is_bounded(chunks: RowsStore) -> None:
    plan = begin(chunks)
    bad = [{"id": f"bad/{index}", "reason": f"reason {index}"} for index in range(4)] + [
        {"id": "bad/4", "reason": "torn"}
    ]
    store_rows(chunks, ChunkKey(0, 0, False), EmbeddedRows(table(chunks.run, *"abcde"), bad[:2]))
    store_rows(chunks, ChunkKey(0, 1, True), EmbeddedRows(table(chunks.run, *"fghij"), bad[2:]))
    records = [*KeptRecords.of(chunks)]
    check_rejected(chunks, plan, records, 0.34)
    with pytest.raises(DataError) as error:
        check_rejected(chunks, plan, records, 0.33)
    assert str(error.value) == (
        "source digits: 5 of 15 rows can't be used, 33.3% where 33.0% are allowed: reason 0, e.g. bad/0;"
        f" torn, e.g. bad/4; reasons are in {chunks.url}/_rejected; mend them and delete {chunks.url}, or go on"
        " (max_rejected=0.34)"
    )


def test_what_rows_lost_is_counted_and_told(chunks: RowsStore, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command at its end, in the status, and in the partition's report (test_partition_page.py)."""
    plan, reasons = begin(chunks), [f"a caption of {number} tokens, of which 8 count, is cut off" for number in (9, 12)]
    losses = [{"id": f"row-{number}", "reason": reason} for number, reason in enumerate(reasons)]
    for number in range(2):
        rows = EmbeddedRows(table(chunks.run, f"row-{number}"), [], losses[number : number + 1])
        store_rows(chunks, ChunkKey(0, number, number == 1), rows)
    manifest = commit(chunks, plan, [*KeptRecords.of(chunks)])
    assert manifest.info["losses"] == [{"id": "row-0", "reason": reasons[0], "rows": 2}]
    _show_rows(chunks.run, ROWS)
    sentence = f"2 images are used that lost something: {reasons[0]}, e.g. row-0"
    assert f"warning: {sentence}\n" in capsys.readouterr().err
    known = status(chunks.run, ROWS)
    assert f", 2 lost something: {reasons[0]}" in describe(known)
    assert Line.of(known).facts == ("2 images, 2 lost something",)


def test_while_rows_are_read_their_number_is_guessed(chunks: RowsStore) -> None:
    plan = begin(chunks)
    bad = [{"id": f"bad/{index}", "reason": "torn"} for index in range(5)]
    store_rows(chunks, ChunkKey(0, 0, False), EmbeddedRows(table(chunks.run, *"abcde"), bad))
    records = [*KeptRecords.of(chunks)]
    check_rejected(chunks, plan, records, 0.1, expected=50.0)
    with pytest.raises(DataError) as error:
        check_rejected(chunks, plan, records, 0.1, expected=49.0)
    message = (
        "5 of the first 10 rows read can't be used, more than the 10.0% that are allowed of about 49: torn, e.g. bad/0;"
    )
    assert message in str(error.value)


def photos(folder: Path) -> None:
    """Two class folders of grey images, some of which are equal, and a file of another kind."""
    generator = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            data = png(generator.integers(0, 256, (8, 8), np.uint8))
            (folder / name / f"{number:02d}.png").write_bytes(data)
    (folder / "dogs" / "99.png").write_bytes((folder / "cats" / "03.png").read_bytes())
    (folder / "notes.txt").write_text("seen")


def test_owners_folders_dont_name_classes_that_are_only_counted(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    source = f"data.source={tmp_path / 'photos'}"
    for name, names in (("counted", ("data.class_names=[]", "data.num_classes=2")), ("named", ())):
        settings = (source, "partition.method=given", *(names or ('data.class_names=["cats", "dogs"]',)))
        run = Run.create(str(tmp_path / name), load_recipe("tiny", settings))
        own = {"source": str(tmp_path / "photos"), "cluster": 0, "chunk_rows": 32, "execute": serial}
        if names:
            with pytest.raises(DataError, match=r"owners' folders would mean other classes at each;.*data.class_names"):
                prepare(run, **own)
            assert not run.store.sizes(owner_rows(0))
        else:
            assert prepare(run, **own).info["rows"] == 41
