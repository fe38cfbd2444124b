"""Names of classes: parquet's numbers mean what its schema says, and names that the run lacks are the source's."""

import json
import unicodedata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddm_ray import plain_text
from ddm_ray.config import DataConfig, load_recipe
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.sources import conditions, open_source
from ddm_ray.errors import DataError, SamplingError
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.run.graph import ROWS, owner_rows
from ddm_ray.run.run import Run
from ddm_ray.sampling.labels import class_number
from tests.data.rows import read_artifact
from tests.data.sources.test_sources import CONFIG, everything, picture, tar_of, write_folder
from tests.random_run import make_run

pytestmark = pytest.mark.contract

NAMES = ("blue", "red", "green")


def write_labelled(path: Path, names: object = NAMES, column: str = "label", rows: int = 30) -> Path:
    """Parquet as the library of Hugging Face writes it, row i of class i % 3 of the names in its schema."""
    images = [{"bytes": picture(index), "path": None} for index in range(rows)]
    table = pa.table({"image": images, column: [index % 3 for index in range(rows)]})
    features = {"image": {"_type": "Image"}, column: {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


def labels(folder: Path, config: DataConfig, read: int = 30) -> list[object]:
    source = open_source(config, str(folder))
    listing = source.list()
    planned = source.planned(source.chunk_rows, listing.classes, numbered=listing.numbered)
    rows = [row for unit in listing.units for chunk in planned.read(unit) for row in chunk.rows]
    assert len(rows) == read and all(row.problem is None for row in rows)
    return [row.condition for row in rows]


def test_numbers_are_told_by_their_names_whatever_their_order(tmp_path: Path) -> None:
    write_labelled(tmp_path / "a.parquet")
    meant = [CONFIG.class_names.index(NAMES[index % 3]) for index in range(30)]
    assert labels(tmp_path, CONFIG) == meant != [index % 3 for index in range(30)]
    assert labels(tmp_path, DataConfig(class_names=("violet", *CONFIG.class_names))) == [each + 1 for each in meant]


def test_names_of_their_own_rename_the_numbers(tmp_path: Path) -> None:
    write_labelled(tmp_path / "a.parquet")
    assert labels(tmp_path, DataConfig(class_names=("sea", "fire", "wood"))) == [index % 3 for index in range(30)]


@pytest.mark.parametrize(
    "names", [None, [], ["a", "a", "b"], ["a", "a ", "b"], [1, 2, 3], "abc", ["a\x1b[2J", "b", "c"]]
)
def test_a_schema_that_names_nothing_leaves_numbers_as_they_are(tmp_path: Path, names: object) -> None:
    write_labelled(tmp_path / "a.parquet", names)
    assert open_source(CONFIG, str(tmp_path)).list().numbered is None
    assert labels(tmp_path, CONFIG) == [index % 3 for index in range(30)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"class_names": ("red", "green", "yellow")}, r"classes that are none of class_names: blue; .* lacks: yellow;"),
        (
            {"class_names": ("red", "green")},
            "classes that are none of class_names: blue; .* it lacks: none",
        ),
        ({"num_classes": 2}, r"3 classes \(blue, red, green\) are more than data.num_classes 2; .*data.num_classes=3"),
    ],
)
def test_names_that_do_not_fit_are_refused_at_once(tmp_path: Path, config: dict[str, object], message: str) -> None:
    write_labelled(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        open_source(DataConfig(**config), str(tmp_path)).list()


def test_a_file_that_numbers_its_classes_otherwise_is_named(tmp_path: Path) -> None:
    write_labelled(tmp_path / "a.parquet")
    write_labelled(tmp_path / "b.parquet", ("red", "green", "blue"))
    with pytest.raises(DataError, match=r"b\.parquet: numbers its classes differently from the first file"):
        labels(tmp_path, CONFIG)


def test_a_plan_of_an_older_version_reads_numbers_as_it_did(tmp_path: Path) -> None:
    write_labelled(tmp_path / "a.parquet")
    source = open_source(CONFIG, str(tmp_path))
    old = source.planned(source.chunk_rows, None)
    (unit,) = source.list().units
    assert [row.condition for chunk in old.read(unit) for row in chunk.rows] == [index % 3 for index in range(30)]


def test_owners_who_only_count_classes_agree_on_numbers(tmp_path: Path) -> None:
    write_labelled(tmp_path / "a.parquet")
    settings = ("partition.method=given", "data.num_classes=3")
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", settings))
    prepare(run, source=str(tmp_path / "a.parquet"), cluster=0, execute=serial)
    rows = read_artifact(run, owner_rows(0), ["id", "label"])
    assert rows["label"].to_pylist() == [index % 3 for index in range(30)]
    assert run.named == run.config


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_run_that_counts_its_classes_has_their_names_once_rows_are_made(tmp_path: Path, kind: str) -> None:
    if kind == "parquet":
        write_labelled(tmp_path / "source/a.parquet")
    else:
        write_folder(tmp_path / "source", 30)
    settings = (f"data.source={tmp_path / 'source'}", "data.num_classes=4", "embedder.dim=8")
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", settings))
    assert run.named == run.config
    prepare(run, execute=serial)
    names = NAMES if kind == "parquet" else ("blue", "green", "red")
    assert run.named.data.class_names == (*names, "3")
    assert run.config.data.class_names == ("0", "1", "2", "3") and Run.open(run.url).config == run.config
    rows = read_artifact(run, ROWS, ["id", "label"])
    for row_id, label in zip(rows["id"].to_pylist(), rows["label"].to_pylist(), strict=True):
        stated = NAMES[int(row_id[-8:]) % 3] if kind == "parquet" else row_id.partition("/")[0]
        assert names[label] == stated


def test_samples_are_asked_for_by_the_names_of_folders(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), num_rows=60)
    manifest = run.require(ROWS)
    ten = [f"class {label}" for label in range(10)]
    pipeline = DDMPipeline.from_run(run)
    assert pipeline.components.class_names == tuple(map(str, range(10)))
    named = type(manifest)(manifest.artifact, manifest.identity, manifest.files, {**manifest.info, "classes": ten})
    run.store.write(f"{ROWS}/_MANIFEST.json", named.to_json())
    pipeline = DDMPipeline.from_run(run)
    assert pipeline.components.class_names == tuple(ten)
    assert class_number("class 7", ten, 10) == 7
    with pytest.raises(SamplingError, match=r"unknown class 'clas 7': use a name .*; did you mean class 7"):
        class_number("clas 7", ten, 10)


def test_names_of_classes_are_put_into_their_form_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each row, of which there may be millions."""
    made: list[object] = []
    monkeypatch.setattr(conditions, "places", lambda names: made.append(names) or plain_text.places(names))
    stated = conditions.Conditions(DataConfig(class_names=(*NAMES, "cafe\u0301")))
    assert [stated.of(name) for name in ("green", "caf\u00e9", "blue")] == [2, 3, 0]
    assert len(made) == 1


@pytest.mark.parametrize("ours", ["NFC", "NFD", "NFC "])
@pytest.mark.parametrize("theirs", ["NFC", "NFD", "NFC "])
def test_names_of_classes_are_compared_in_one_form(tmp_path: Path, ours: str, theirs: str) -> None:
    """A Mac writes `é` as two characters, a keyboard as one, and people a space that nobody sees."""
    cafe, caf_e = (unicodedata.normalize(form[:3], "café") + form[3:] for form in (ours, theirs))
    config = DataConfig(class_names=("bar", cafe))
    for source in ("folder", "tar", "parquet"):
        (tmp_path / source).mkdir()
    (tmp_path / "folder" / caf_e).mkdir()
    (tmp_path / "folder" / caf_e / "a.png").write_bytes(picture(0))
    tar_of(tmp_path / "tar/x.tar", ("a.png", picture(0)), ("a.cls", caf_e.encode()))
    pq.write_table(pa.table({"image": [picture(0)], "label": [caf_e]}), tmp_path / "parquet/x.parquet")
    for source in ("folder", "tar", "parquet"):
        (row,) = everything(open_source(config, str(tmp_path / source)))
        assert (row.condition, row.problem) == (1, None), source
    counted = open_source(DataConfig(num_classes=2), str(tmp_path / "folder"))
    assert counted.list().classes == ("café",)
