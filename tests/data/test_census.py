"""What is looked at before rows are committed: files of other kinds, rejected rows, ids and images that come twice."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddm_ray.config import load_recipe
from ddm_ray.data import census
from ddm_ray.data.census import check_rejected
from ddm_ray.data.images import png
from ddm_ray.data.parts import AHEAD, Parts, Plan, Record, list_source
from ddm_ray.data.schema import DUPLICATES
from ddm_ray.data.sources import open_source
from ddm_ray.errors import DataError
from ddm_ray.storage.records import Place
from ddm_ray.storage.run import ROWS, Run, owner_rows
from tests.data.rows import commit_tables, make_rows, table


def tiny(folder: Path, *settings: str) -> Run:
    return Run.create(str(folder / "run"), load_recipe("tiny", settings))


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tiny(tmp_path), ROWS)


def begin(parts: Parts) -> Plan:
    source = open_source(parts.run.config.data, chunk_rows=100)
    return parts.plan(lambda: list_source(parts.run.config, "digits", source, 100))


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


def test_an_id_that_comes_twice_is_refused_by_name(parts: Parts) -> None:
    with pytest.raises(DataError, match=r"source tables: 1 ids come twice, e.g. b; give each row its own"):
        commit_tables(parts.run, [table(parts.run, "a", "b"), table(parts.run, "c", "b")])
    assert parts.run.finished(ROWS) is None


def test_a_clash_of_hashes_is_no_clash_of_ids(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddm_ray.data.parts.ranks", lambda ids: np.full(len(ids), 7, np.uint64))
    assert commit_tables(parts.run, [table(parts.run, "a", "b"), table(parts.run, "c")]).info["rows"] == 3


def test_rows_that_are_all_held_out_are_refused(parts: Parts) -> None:
    with pytest.raises(DataError, match=r"no row to train on: 2 can be used and data.heldout is 0.1"):
        commit_tables(parts.run, [table(parts.run, "a", "b", split="heldout")])


def test_the_share_of_rejected_rows_is_bounded(parts: Parts) -> None:
    plan = begin(parts)
    bad = [{"id": f"bad/{index}", "reason": f"reason {index}"} for index in range(4)] + [
        {"id": "bad/4", "reason": "torn"}
    ]
    parts.write(Place(0, 0, False), table(parts.run, *"abcde"), 8, bad[:2])
    parts.write(Place(0, 1, True), table(parts.run, *"fghij"), 8, bad[2:])
    records = parts.records(parts.places())
    check_rejected(parts, plan, records, 0.34)
    with pytest.raises(DataError) as error:
        check_rejected(parts, plan, records, 0.33)
    assert str(error.value) == (
        "source digits: 5 of 15 rows can't be used, 33.3% where 33.0% are allowed: reason 0, e.g. bad/0;"
        f" torn, e.g. bad/4; reasons are in {parts.url}/_rejected; mend them and delete {parts.url}, or go on with"
        " --max-rejected 0.34"
    )


def test_while_rows_are_read_their_number_is_guessed(parts: Parts) -> None:
    plan = begin(parts)
    bad = [{"id": f"bad/{index}", "reason": "torn"} for index in range(5)]
    parts.write(Place(0, 0, False), table(parts.run, *"abcde"), 8, bad)
    records = parts.records(parts.places())
    check_rejected(parts, plan, records, 0.1, total=50.0)
    with pytest.raises(DataError) as error:
        check_rejected(parts, plan, records, 0.1, total=49.0)
    told = (
        "5 of the first 10 rows read can't be used, more than the 10.0% that are allowed of about 49: torn, e.g. bad/0;"
    )
    assert told in str(error.value)


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
        opened = open_source(run.config.data, chunk_rows=32)
        if names:
            with pytest.raises(DataError, match=r"owners' folders would mean other classes at each;.*data.class_names"):
                make_rows(run, opened, 32, owner_rows(0))
            assert not run.store.sizes(owner_rows(0))
        else:
            assert make_rows(run, opened, 32, owner_rows(0)).info["rows"] == 41


def test_files_of_another_kind_are_counted(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    run = tiny(tmp_path, f"data.source={tmp_path / 'photos'}", "data.class_names=[]", "data.num_classes=2")
    info = make_rows(run, open_source(run.config.data, chunk_rows=8), 8).info
    assert (info["ignored"], info["duplicates"]) == ({".txt": 1}, 1)


def test_parts_are_read_in_order_and_few_at_once(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        parts.write(Place(0, number, number == 11), table(parts.run, f"row-{number:02d}"), 8, [])
    records = parts.records(parts.places())
    begun: list[Record] = []
    read = Parts.read_part

    def slow(self: Parts, record: Record, columns: list[str]) -> pa.Table:
        begun.append(record)
        time.sleep(0.02 * (record.place.chunk % 2))
        return read(self, record, columns)

    monkeypatch.setattr(Parts, "read_part", slow)
    for number, found in enumerate(parts.read_parts(records, ["id"])):
        assert found["id"].to_pylist() == [f"row-{number:02d}"]
        assert len(begun) <= number + 1 + AHEAD


def test_only_rows_with_a_doubled_hash_are_looked_at(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    whole = census._read

    def watched(*arguments: Any) -> Iterator[pa.Table]:
        for found in whole(*arguments):
            looked.extend(found["id"].to_pylist())
            yield found

    monkeypatch.setattr("ddm_ray.data.census._read", watched)
    tables = [table(parts.run, "a", "b", contents=["x", "y"]), table(parts.run, "c", "d", contents=["z", "x"])]
    assert commit_tables(parts.run, tables).info["duplicates"] == 1
    assert looked == ["a", "d"]
