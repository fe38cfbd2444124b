import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import T5Config, T5EncoderModel

from ddm_ray.config import load_recipe
from ddm_ray.data.images import png
from ddm_ray.data.prepare.finalize import commit
from ddm_ray.data.prepare.records import (
    EmbeddedRows,
    RowsStore,
    SourcePlan,
    content_digest,
    read_rows,
    rows_store,
    store_rows,
)
from ddm_ray.data.prepare.stage import list_source, prepare, source_of
from ddm_ray.data.schema import to_parquet
from ddm_ray.data.sharded.kept_records import KeptRecords
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.sharded.work import FinishedChunk
from ddm_ray.data.sources import Listing, Unit, open_source
from ddm_ray.data.sources.shapes import Shapes
from ddm_ray.data.texts import read_null_text
from ddm_ray.errors import ConfigError, CorruptArtifact, DriftError
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.status import status
from ddm_ray.jobs.versions import installed_versions
from ddm_ray.models.null_text import NULL_TEXT
from ddm_ray.run.chunk_records import ChunkKey
from ddm_ray.run.graph import ROWS, owner_rows
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import Run
from ddm_ray.store.checksummed import seal, unseal
from tests.data.rows import commit_rows, commit_tables, read_artifact, table
from tests.models.test_text import tokenizer

pytestmark = pytest.mark.contract

PLAN = f"{ROWS}/_plan/PLAN.json"
GIVEN = ("partition.method=given",)


def tiny(folder: Path, *settings: str) -> Run:
    return Run.create(str(folder / "run"), load_recipe("tiny", settings))


@pytest.fixture
def chunks(tmp_path: Path) -> RowsStore:
    return rows_store(tiny(tmp_path), ROWS)


def begin(chunks: RowsStore, chunk_rows: int = 100) -> SourcePlan:
    config = chunks.run.config
    source = open_source(config.data, chunk_rows=chunk_rows)
    return chunks.plan(lambda: list_source(config, "digits", source, chunk_rows))


class Stopped(Exception):
    """Raised by an executor that has made as many chunks as it was to make."""


def make(chunks: RowsStore, chunk_rows: int = 100, most: int = 1000) -> int:
    """Prepare up to `most` chunks that aren't finished, and stop before the rows are; how many there were."""
    made = 0

    def stopping(*arguments) -> Iterator[FinishedChunk]:
        nonlocal made
        for chunk in islice(serial(*arguments), most):
            made += 1
            yield chunk
        raise Stopped

    with pytest.raises(Stopped):
        prepare(chunks.run, chunk_rows=chunk_rows, execute=stopping)
    return made


def end(chunks: RowsStore, plan: SourcePlan) -> Manifest:
    chunks.require_complete(plan, records := [*KeptRecords.of(chunks)])
    return commit(chunks, plan, records)


def files(run: Run) -> dict[str, int]:
    return {name: os.stat(f"{run.url}/{ROWS}/{name}").st_ino for name in run.store.sizes(ROWS)}


def test_a_chunk_is_a_part_and_parts_are_in_the_sources_order(tmp_path: Path) -> None:
    run = commit_rows(tmp_path / "run", chunk_rows=600)
    manifest = run.require(ROWS)
    assert [name.rpartition("-")[0] for name in manifest.files] == [f"part-000000-00000{chunk}" for chunk in range(3)]
    ids = read_artifact(run, ROWS)["id"].to_pylist()
    assert ids == [f"digits/{index:04d}" for index in range(1797)]
    assert manifest.info == {
        "rows": 1797,
        "rows_train": 1632,
        "rows_heldout": 165,
        "rejected": 0,
        "duplicates": 0,
        "dropped": 0,
        "embedding_dim": 8,
        "source": "digits",
        "classes": None,
        "ignored": {},
        "reasons": [],
        "networks": {},
        "versions": installed_versions(),
    }


def test_what_is_finished_is_kept_and_what_is_missing_is_made(tmp_path: Path, chunks: RowsStore) -> None:
    expected = commit_rows(tmp_path / "whole", chunk_rows=100).require(ROWS)
    run = chunks.run
    assert make(chunks, most=5) == 5
    assert status(run, ROWS).state == "begun"
    assert describe(status(run, ROWS)) == "0 of 1 units of the source, 5 parts"
    before = files(run)
    # A part without a record, of a kill between the two; and a record lost from the middle.
    run.store.write(f"{ROWS}/part-000000-000009-deadbeef.parquet", b"torn")
    run.store.delete_one(f"{ROWS}/_parts/000000-000002.json")
    assert make(chunks) == 14
    assert describe(status(run, ROWS)) == "1 of 1 units of the source, 18 parts"
    manifest = prepare(run, chunk_rows=7, execute=lambda *_: pytest.fail("nothing is missing"))
    after = files(run)
    kept = {name for name in before if "000000-000002" not in name}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert "part-000000-000009-deadbeef.parquet" not in after
    assert (manifest.content, manifest.files, manifest.info) == (expected.content, expected.files, expected.info)
    assert status(run, ROWS).fraction == 1.0


def test_the_first_of_two_rivals_counts(chunks: RowsStore) -> None:
    key = ChunkKey(0, 0, True)
    first, second = table(chunks.run, "a", "b"), table(chunks.run, "a", "b").set_column(2, "label", pa.array([1, 1]))
    ours = store_rows(chunks, key, EmbeddedRows(first, []))
    theirs = EmbeddedRows(second, [{"id": "c", "reason": "otherwise"}])
    for late in (EmbeddedRows(first, []), theirs):
        assert store_rows(chunks, key, late).files == ours.files
    (record,) = [*KeptRecords.of(chunks)]
    assert set(chunks.store.sizes(ROWS)) == {*record.files, "_parts/000000-000000-last.json"}
    assert read_rows(chunks, record, ["label"])["label"].to_pylist() == [0, 0]
    assert (record.rows, record.rejected, record.heldout) == (2, 0, 0)


def test_what_is_missing_at_the_end_is_named(chunks: RowsStore) -> None:
    plan = begin(chunks, 1000)
    make(chunks, 1000)
    (part, _) = sorted(name for name in chunks.store.sizes(ROWS) if name.startswith("part-"))
    complete = chunks.store.read(f"{ROWS}/{part}")
    chunks.store.write(f"{ROWS}/{part}", b"PAR1")
    with pytest.raises(CorruptArtifact, match=f"{part}: gone or cut short; delete .*000000.json"):
        end(chunks, plan)
    chunks.store.write(f"{ROWS}/{part}", complete)
    store_rows(chunks, ChunkKey(0, 1, False), EmbeddedRows(table(chunks.run, "z"), []))
    with pytest.raises(CorruptArtifact, match="two records for chunk 000000-000001"):
        end(chunks, plan)
    chunks.store.delete_one(f"{ROWS}/_parts/000000-000000.json")
    with pytest.raises(CorruptArtifact, match=r"1 units have no whole record, e\.g\. digits"):
        end(chunks, plan)


def test_a_plan_is_made_once_and_holds_the_units(chunks: RowsStore) -> None:
    units = (Unit("b", 3, ("x", "y"), (1, 2)), Unit("a", 0))
    plan = SourcePlan("somewhere", 32, ("cats", "dogs"), units, {".txt": 7}, bounded=True)
    assert chunks.plan(lambda: plan) == plan
    assert chunks.plan(lambda: pytest.fail("listed again")) == plan
    assert json.loads(chunks.store.read(PLAN))["source"] == "somewhere"


def test_rows_that_an_older_version_began_are_not_finished(chunks: RowsStore) -> None:
    plan = begin(chunks)
    fields = unseal(chunks.store.read(PLAN), PLAN)
    assert fields.pop("bounded") is True
    chunks.store.write(PLAN, seal(fields))
    assert chunks.begun() == replace(plan, bounded=False)
    with pytest.raises(DriftError, match=f"^{chunks.url} was begun by an older version, .*; delete "):
        prepare(chunks.run, execute=lambda *_: pytest.fail("nothing is made"))


def test_a_rivals_plan_counts(chunks: RowsStore) -> None:
    theirs, ours = (SourcePlan(name, 32, None, (Unit("a", 1),)) for name in ("theirs", "ours"))

    def late() -> SourcePlan:
        rows_store(chunks.run, ROWS).plan(lambda: theirs)
        return ours

    assert chunks.plan(late) == theirs


def test_rows_are_of_one_source(tmp_path: Path) -> None:
    run = tiny(tmp_path, *GIVEN)
    with pytest.raises(ConfigError, match=r"name the images of owner 1 \(source=URI\)"):
        prepare(run, cluster=1, execute=serial)
    for name in ("photos", "digits_photos", "digits/photos"):
        assert source_of(run, owner_rows(1), None, name, 1) == os.path.abspath(name)
    for name in ("digits", "shapes:90"):
        assert source_of(run, owner_rows(1), None, name, 1) == name
    manifest = commit_tables(run, [table(run, "a", "b").drop_columns("embedding")], owner_rows(1))
    assert prepare(run, cluster=1, execute=serial) == manifest
    for finished in (True, False):
        with pytest.raises(DriftError, match="was begun from tables, not from s3://elsewhere/photos"):
            prepare(run, source="s3://elsewhere/photos", cluster=1, execute=serial)
        if finished:
            run.store.delete_one(f"{owner_rows(1)}/_MANIFEST.json")


def test_rows_begun_from_another_source_meanwhile_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, listed = tiny(tmp_path, *GIVEN), Shapes.list

    def list_late(self: Shapes) -> Listing:
        with pytest.raises(CorruptArtifact, match="1 units have no whole record"):
            prepare(run, source="digits", cluster=1, execute=lambda *_: (chunk for chunk in ()))
        return listed(self)

    monkeypatch.setattr(Shapes, "list", list_late)
    with pytest.raises(DriftError, match="was begun from digits, not from shapes:90"):
        prepare(run, source="shapes:90", cluster=1, execute=serial)


def test_texts_come_with_the_empty_prompts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    T5EncoderModel(T5Config(vocab_size=12, d_model=20, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).save_pretrained(
        tmp_path / "t5"
    )
    tokenizer(begins=False).save_pretrained(tmp_path / "t5")
    pixels_NHW = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    rows = {"image": [{"bytes": png(pixels_HW), "path": None} for pixels_HW in pixels_NHW], "text": ["a red cat"] * 40}
    rows["text"][7] = ""
    pq.write_table(pa.table(rows), tmp_path / "captions.parquet")
    data = {
        "source": str(tmp_path / "captions.parquet"),
        "text": {"encoder": str(tmp_path / "t5"), "tokens": 6, "dim": 20},
    }
    run = commit_rows(tmp_path / "run", (f"data={json.dumps(data)}",), chunk_rows=16)
    manifest = run.require(ROWS)
    null = read_null_text(run.read(ROWS, NULL_TEXT), NULL_TEXT)
    assert null.tokens_BLE.shape[0] == 1
    assert (manifest.info["rows"], manifest.info["rejected"]) == (39, 1)
    assert read_artifact(run, ROWS, ["text"])["text"].to_pylist() == ["a red cat"] * 39


def test_content_is_of_values_alone(chunks: RowsStore) -> None:
    contiguous = table(chunks.run, *"abcd")
    apart = pa.concat_tables([contiguous.slice(0, 1), contiguous.slice(1)])
    assert content_digest(contiguous) == content_digest(apart)
    assert to_parquet(contiguous) == to_parquet(apart)
    changed = {
        content_digest(contiguous.set_column(0, "id", pa.array(ids))) for ids in (["ab", "", "c", "d"], list("abdc"))
    }
    assert len(changed | {content_digest(contiguous), content_digest(contiguous.slice(1))}) == 4
