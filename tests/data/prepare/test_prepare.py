"""The stage as a user runs it, on an island: the same rows as made in one process, errors in one line."""

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.config import load_recipe
from ddm_ray.data.images import png
from ddm_ray.data.prepare import stage
from ddm_ray.data.schema import images, rows_schema
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.sharded.work import Chunk
from ddm_ray.data.sources import Encoded, EncodedChunk, Listing, Unit
from ddm_ray.errors import ConfigError, DataError, DriftError, RayError
from ddm_ray.placement import PreparePlacement
from ddm_ray.run.graph import ROWS, owner_rows
from ddm_ray.run.run import Run
from tests.data.broken import CLASSES, write_images
from tests.data.rows import commit_rows, read_artifact

pytestmark = pytest.mark.integration

PHOTOS = (
    "data.class_names=[]",
    f"data.num_classes={len(CLASSES)}",
    "data.channels=3",
    "data.image_size=16",
    "embedder.dim=8",
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str], dict[str, str]]:
    """2,000 images of many formats and 50 that are broken: the folder, ids of the former, kinds of the latter."""
    folder = tmp_path_factory.mktemp("photos") / "photos"
    return folder, *write_images(folder)


# As few actors as there may be, which is two: their start is most of what a small source costs.
prepare = partial(stage.prepare, placement=PreparePlacement(embedders=1))


def tiny(folder: Path, *settings: str) -> Run:
    return Run.create(str(folder / "run"), load_recipe("tiny", settings))


def reasons(run: Run) -> dict[str, str]:
    names = run.store.sizes(f"{ROWS}/_rejected")
    rejected = [entry for name in names for entry in json.loads(run.store.read(f"{ROWS}/_rejected/{name}"))]
    assert len(rejected) == len({entry["id"] for entry in rejected})
    return {entry["id"]: entry["reason"] for entry in rejected}


def test_digits_become_rows_once(ray_cluster: str, tmp_path: Path) -> None:
    run = tiny(tmp_path)
    notes: list[tuple[float, str]] = []
    manifest = prepare(run, lambda fraction, note: notes.append((fraction, note)), chunk_rows=256)
    rows = read_artifact(run, ROWS)
    assert rows.schema.equals(rows_schema(run.config.data, 8))
    pixels, labels = digits()
    assert np.abs((images(rows, run.config.data).reshape(-1, 64) + 1) * 8 - pixels).max() < 0.04
    assert rows["label"].to_pylist() == labels.tolist()
    fractions = [fraction for fraction, _ in notes]
    assert fractions == sorted(fractions)
    assert notes[-1] == (1.0, "1797 rows, 0 rejected")
    assert any("1797 rows, 0 rejected" in note and "rows/s" in note for _, note in notes)
    expected = commit_rows(tmp_path / "whole", chunk_rows=256).require(ROWS)
    assert (manifest.content, manifest.files, manifest.info) == (expected.content, expected.files, expected.info)

    before = dict(run.store.sizes(ROWS))
    assert prepare(run, lambda *_: pytest.fail("a finished stage does nothing")) == manifest
    assert dict(run.store.sizes(ROWS)) == before


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return pixels, labels


def test_no_image_is_lost_silently(
    ray_cluster: str, tmp_path: Path, photos: tuple[Path, set[str], dict[str, str]]
) -> None:
    folder, good, broken = photos
    run = tiny(tmp_path, f"data.source={folder}", *PHOTOS)
    manifest = stage.prepare(run, chunk_rows=64)
    assert manifest.info["rows"] + manifest.info["rejected"] == 2050
    assert sum(path.is_file() for path in folder.rglob("*")) == 2050
    assert set(read_artifact(run, ROWS, ["id"])["id"].to_pylist()) == good
    reason_by_id = reasons(run)
    assert reason_by_id.keys() == broken.keys()
    assert all(reason and "\n" not in reason and " at 0x" not in reason for reason in reason_by_id.values())
    assert all(reason_by_id[entry["id"]] == entry["reason"] for entry in manifest.info["reasons"])
    assert sum(entry["rows"] for entry in manifest.info["reasons"]) == len(broken)
    assert manifest.info["classes"] == list(CLASSES)
    plain = tiny(tmp_path / "plain", f"data.source={folder}", *PHOTOS)
    assert prepare(plain, chunk_rows=64, execute=serial).content == manifest.content


def test_too_many_rejected_rows_stop_the_stage_and_may_be_allowed(
    ray_cluster: str, tmp_path: Path, photos: tuple[Path, set[str], dict[str, str]]
) -> None:
    folder, _, _ = photos
    bad = tmp_path / "photos"
    shutil.copytree(folder / "apples", bad / "apples")
    for path in sorted((bad / "apples").iterdir())[:200]:
        path.write_bytes(b"text")
    for name in CLASSES[1:]:
        shutil.copytree(folder / name, bad / name)
    run = tiny(tmp_path, f"data.source={bad}", *PHOTOS)
    with pytest.raises(DataError) as error:
        prepare(run, chunk_rows=32)
    assert re.search(r"of the first \d+ rows read can't be used, more than the 5.0% that", str(error.value))
    assert "or go on (max_rejected=0." in str(error.value)
    assert ": UnidentifiedImageError: not an image of a known format, e.g. apples/" in str(error.value)
    assert "\n" not in str(error.value)
    seen = sum(run.store.sizes(f"{ROWS}/_rejected").values())
    assert seen
    manifest = prepare(run, max_rejected=0.5, chunk_rows=32, execute=serial)
    assert manifest.info["rejected"] == len(reasons(run)) >= 200
    assert manifest.info["rows"] + manifest.info["rejected"] == 2050


def test_a_network_that_cant_be_loaded_is_told_in_one_line(ray_cluster: str, tmp_path: Path) -> None:
    run = tiny(tmp_path, 'embedder={"kind": "timm", "checkpoint": "/nowhere/vit.pt"}')
    with pytest.raises(DataError, match=r"embedder.checkpoint /nowhere/vit.pt: no such file"):
        prepare(run)
    assert run.finished(ROWS) is None


@pytest.mark.parametrize("where", ["reading", "finishing"])
def test_a_bug_is_told_as_one(ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A source that breaks down, or one whose labels aren't numbers, which the next step notices."""

    class Broken:
        def list(self) -> Listing:
            return Listing((Unit("all", 1),))

        def planned(self, *_: object) -> "Broken":
            return self

        def read(self, unit: Unit, skip: object = ()) -> Iterator[EncodedChunk]:
            if where == "reading":
                raise ZeroDivisionError("no share of nothing")
            yield Chunk(0, [Encoded("a", png(np.zeros((8, 8), np.uint8)), "no number")], 1.0)

    monkeypatch.setattr("ddm_ray.data.prepare.stage.open_source", lambda *_: Broken())
    with pytest.raises(RayError) as error:
        prepare(tiny(tmp_path, "partition.method=given"), cluster=0, source="digits")
    cause = "ZeroDivisionError: no share of nothing" if where == "reading" else r"\S*ArrowInvalid: Could not convert .*"
    assert re.search(f"/rows/cluster=000: {cause}; this is likely a bug", str(error.value))
    assert "goes on" not in str(error.value)


def test_an_island_without_a_gpu_says_so(ray_cluster: str, tmp_path: Path) -> None:
    with pytest.raises(RayError, match="has no GPU"):
        stage.prepare(tiny(tmp_path), placement=PreparePlacement(use_gpu=True))


def test_owners_prepare_their_rows_apart(tmp_path: Path) -> None:
    run, prepare = tiny(tmp_path, "partition.method=given"), partial(stage.prepare, execute=serial)
    with pytest.raises(ConfigError, match=r"name the owner of these rows \(cluster=0 to 1\)"):
        prepare(run)
    with pytest.raises(ConfigError, match="this run has clusters 0 to 1"):
        prepare(run, cluster=2, source="digits")
    manifest = prepare(run, cluster=1, source="digits", chunk_rows=600)
    assert "embedding" not in read_artifact(run, owner_rows(1)).column_names
    assert manifest.info["embedding_dim"] == 0
    assert run.manifest(owner_rows(0)) is None
    with pytest.raises(DriftError, match="was begun from digits, not from /elsewhere"):
        prepare(run, cluster=1, source="/elsewhere")


def test_the_command_says_what_was_left_out_and_why(
    ray_cluster: str, tmp_path: Path, photos: tuple[Path, set[str], dict[str, str]]
) -> None:
    folder, _, _ = photos
    small = tmp_path / "photos"
    for name in CLASSES:
        (small / name).mkdir(parents=True)
        for path in sorted((folder / name).iterdir())[-40:]:
            shutil.copy(path, small / name)
    twin = next(path for path in sorted((small / CLASSES[0]).iterdir()) if "broken" not in path.name)
    shutil.copy(twin, twin.with_name(f"twin-{twin.name}"))
    for ignored in ("notes.txt", "a.zip", "b.zip"):
        (small / ignored).write_text("seen")
    run = tiny(tmp_path, f"data.source={small}", *PHOTOS)
    many = sum("broken" in path.name for path in small.rglob("*.*"))
    refused = CliRunner().invoke(main, ["prepare", run.url, "--max-rejected", "0.1"])
    assert refused.exit_code == 1
    assert f"{many} of 161 rows can't be used" in refused.stderr
    done = CliRunner().invoke(main, ["prepare", run.url, "--max-rejected", "0.5"])
    assert done.exit_code == 0, done.stderr
    assert f"{many} images can't be used and are left out; {run.url}/rows/_rejected says why" in done.stdout
    assert re.search(r"^ +\d+ UnidentifiedImageError: not an image of a known format, e.g. \w+/", done.stdout, re.M)
    assert "warning: 3 files aren't read: 2 .zip, 1 .txt\n" in done.stderr
    assert "held-out" not in done.stderr
    assert "classes: 0 apples, 1 boats," in done.stdout
    assert "1 images are byte by byte equal to an earlier one: kept" in done.stdout
