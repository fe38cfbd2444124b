import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import T5Config, T5EncoderModel

from ddm_ray.config import load_recipe
from ddm_ray.data.census import commit
from ddm_ray.data.chunks import FinishChunks, fit, fitted
from ddm_ray.data.decoding import as_task, raise_failed, read_units
from ddm_ray.data.images import png
from ddm_ray.data.parts import Parts, Plan, content_digest, source_of
from ddm_ray.data.schema import to_parquet
from ddm_ray.data.sources import Unit, open_source
from ddm_ray.data.texts import NULL_TEXT, read_null_text
from ddm_ray.errors import ConfigError, CorruptArtifact, DataError, DriftError
from ddm_ray.storage.records import Place, chunks_done
from ddm_ray.storage.run import ROWS, Run, owner_rows
from ddm_ray.storage.status import describe, status
from tests.data.rows import commit_rows, commit_tables, flip_byte, read_artifact, table
from tests.models.test_text import tokenizer

PLAN = f"{ROWS}/_plan/PLAN.json"
GIVEN = ("partition.method=given",)


def tiny(folder: Path, *settings: str) -> Run:
    return Run.create(str(folder / "run"), load_recipe("tiny", settings))


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tiny(tmp_path), ROWS)


def begin(parts: Parts, chunk_rows: int = 100) -> Plan:
    source = open_source(parts.run.config.data, chunk_rows=chunk_rows)
    return parts.plan(lambda: Plan("digits", chunk_rows, source.classes, tuple(source.units())))


def make(parts: Parts, plan: Plan, most: int = 1000) -> int:
    """Finish up to `most` of the digits' chunks that aren't finished; how many there were."""
    source = open_source(parts.run.config.data, chunk_rows=plan.chunk_rows)
    fit(parts, plan, source)
    finish = FinishChunks(parts.run, parts.artifact, "cpu")
    done, whole = chunks_done(parts.places())
    if 0 in whole:
        return 0
    tasks = pa.Table.from_pylist([as_task(0, plan.units[0], done.get(0, set()))])
    made = 0
    for chunk in read_units(tasks, source, parts.run.config.data):
        if made == most:
            break
        assert finish(chunk)["error"].to_pylist() == [None]
        made += 1
    return made


def end(parts: Parts, plan: Plan):
    return commit(parts, plan, parts.records(parts.places()))


def read_all(parts: Parts) -> None:
    begin(parts)
    parts.records(parts.places())
    fitted(parts)


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
    }


def test_what_is_finished_is_kept_and_what_is_missing_is_made(tmp_path: Path, parts: Parts) -> None:
    whole = commit_rows(tmp_path / "whole", chunk_rows=100).require(ROWS)
    run, plan = parts.run, begin(parts)
    assert status(run, ROWS).state == "begun"
    assert make(parts, plan, 5) == 5
    assert describe(status(run, ROWS)) == "0 of 1 units of the source, 5 parts"
    before = files(run)
    # A part without a record, of a kill between the two; and a record lost from the middle.
    run.store.write(f"{ROWS}/part-000000-000009-deadbeef.parquet", b"torn")
    run.store.delete_one(f"{ROWS}/_parts/000000-000002.json")
    assert make(parts, plan) == 14
    assert make(parts, plan) == 0
    assert describe(status(run, ROWS)) == "1 of 1 units of the source, 18 parts"
    manifest = end(parts, plan)
    after = files(run)
    kept = {name for name in before if "000000-000002" not in name}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert "part-000000-000009-deadbeef.parquet" not in after
    assert (manifest.content, manifest.files, manifest.info) == (whole.content, whole.files, whole.info)
    assert status(run, ROWS).fraction == 1.0


def test_the_first_of_two_rivals_counts(parts: Parts) -> None:
    place = Place(0, 0, True)
    first, second = table(parts.run, "a", "b"), table(parts.run, "a", "b").set_column(2, "label", pa.array([1, 1]))
    parts.write(place, first, 8, [])
    parts.write(place, first, 8, [])
    parts.write(place, second, 8, [{"id": "c", "reason": "otherwise"}])
    (record,) = parts.records(parts.places())
    assert set(parts.store.sizes(ROWS)) == {*record.files, "_parts/000000-000000-last.json"}
    assert parts.read_part(record, ["label"])["label"].to_pylist() == [0, 0]
    assert (record.rows, record.rejected, record.heldout) == (2, 0, 0)


def test_every_altered_byte_of_plan_record_and_embedder_is_noticed(parts: Parts) -> None:
    plan = begin(parts, 1000)
    make(parts, plan)
    names = [name for name in parts.store.sizes(ROWS) if name.startswith(("_plan", "_parts", "_embedder"))]
    assert len(names) == 6
    generator = np.random.default_rng(0)
    for name in names:
        sound = parts.store.read(f"{ROWS}/{name}")
        for position in generator.integers(0, len(sound), 40):
            damaged = bytearray(sound)
            damaged[position] ^= 1 << generator.integers(8)
            parts.store.write(f"{ROWS}/{name}", bytes(damaged))
            with pytest.raises(CorruptArtifact) as error:
                read_all(parts)
            assert f"{ROWS}/{name}" in str(error.value)
            assert "delete" in str(error.value)
        parts.store.write(f"{ROWS}/{name}", sound[:-2])
        with pytest.raises(CorruptArtifact):
            read_all(parts)
        parts.store.write(f"{ROWS}/{name}", sound)
    assert end(parts, plan).info["rows"] == 1797


def test_records_that_stand_for_others_are_refused(parts: Parts) -> None:
    make(parts, begin(parts, 1000))
    swapped = parts.store.read(f"{ROWS}/_parts/000000-000000.json")
    parts.store.write(f"{ROWS}/_parts/000000-000001-last.json", swapped)
    with pytest.raises(CorruptArtifact, match=r"000000-000001-last.json: is another's; delete it"):
        parts.records(parts.places())


@pytest.mark.parametrize("damage", ["gone", "cut", "no record", "two lasts"])
def test_what_is_missing_at_the_end_is_named(parts: Parts, damage: str) -> None:
    plan = begin(parts, 1000)
    make(parts, plan)
    (part, _) = sorted(name for name in parts.store.sizes(ROWS) if name.startswith("part-"))
    if damage == "gone":
        parts.store.delete_one(f"{ROWS}/{part}")
    elif damage == "cut":
        parts.store.write(f"{ROWS}/{part}", b"PAR1")
    elif damage == "no record":
        parts.store.delete_one(f"{ROWS}/_parts/000000-000000.json")
    else:
        parts.write(Place(0, 1, False), table(parts.run, "z"), 8, [])
    named = {
        "no record": "1 units have no whole record, e.g. digits",
        "two lasts": "two records for chunk 000000-000001",
    }
    with pytest.raises(CorruptArtifact, match=named.get(damage, f"{part}: gone or cut short; delete .*000000.json")):
        end(parts, plan)


def test_a_damaged_part_isnt_read(parts: Parts) -> None:
    make(parts, begin(parts, 1000))
    record = parts.records(parts.places())[0]
    assert record.part
    flip_byte(parts.run, f"{ROWS}/{record.part[0]}")
    with pytest.raises(CorruptArtifact, match="checksum differs"):
        parts.read_part(record, ["id"])


def test_a_plan_is_made_once_and_holds_the_units(parts: Parts) -> None:
    units = (Unit("b", 3, ("x", "y"), (1, 2)), Unit("a", 0))
    plan = Plan("somewhere", 32, ("cats", "dogs"), units, {".txt": 7})
    assert parts.plan(lambda: plan) == plan
    assert parts.plan(lambda: pytest.fail("listed again")) == plan
    assert json.loads(parts.store.read(PLAN))["source"] == "somewhere"


def test_a_rivals_plan_counts(parts: Parts) -> None:
    theirs, ours = Plan("theirs", 32, None, (Unit("a", 1),)), Plan("ours", 64, None, (Unit("b", 2),))

    def late() -> Plan:
        Parts(parts.run, ROWS).plan(lambda: theirs)
        return ours

    assert parts.plan(late) == theirs


def test_rows_are_of_one_source(tmp_path: Path) -> None:
    run = tiny(tmp_path, *GIVEN)
    parts = Parts(run, owner_rows(1))
    with pytest.raises(ConfigError, match="name the images of owner 1 with --source URI"):
        source_of(parts, None, 1)
    for name in ("photos", "digits_photos", "digits/photos"):
        assert source_of(parts, name, 1) == os.path.abspath(name)
    assert [source_of(parts, name, 1) for name in ("digits", "shapes:90")] == ["digits", "shapes:90"]
    commit_tables(run, [table(run, "a", "b").drop_columns("embedding")], owner_rows(1))
    assert source_of(parts, None, 1) == "tables"
    with pytest.raises(DriftError, match="was begun from tables, not from s3://elsewhere/photos"):
        source_of(parts, "s3://elsewhere/photos", 1)


def test_an_error_of_the_source_comes_back_as_a_row(parts: Parts) -> None:
    source = open_source(parts.run.config.data, str(Path(parts.run.url).parent))
    Path(parts.run.url).with_name("a.parquet").write_bytes(b"PAR1 no table PAR1")
    (unit,) = source.units()
    Path(parts.run.url).with_name("a.parquet").write_bytes(b"another size")
    (row,) = read_units(pa.Table.from_pylist([as_task(0, unit, set())]), source, parts.run.config.data)
    done = FinishChunks(parts.run, ROWS, "cpu")(row)
    with pytest.raises(DataError, match=r"a.parquet"):
        raise_failed(done["error"][0].as_py())


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


def test_content_is_of_values_alone(parts: Parts) -> None:
    whole = table(parts.run, *"abcd")
    apart = pa.concat_tables([whole.slice(0, 1), whole.slice(1)])
    assert content_digest(whole) == content_digest(apart)
    assert to_parquet(whole) == to_parquet(apart)
    changed = {content_digest(whole.set_column(0, "id", pa.array(ids))) for ids in (["ab", "", "c", "d"], list("abdc"))}
    assert len(changed | {content_digest(whole), content_digest(whole.slice(1))}) == 4
