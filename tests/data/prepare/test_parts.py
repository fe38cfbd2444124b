"""Images are prepared in parts: progress moves, a kill costs the part under way, older plans go on as they were."""

import tarfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddm_ray.config import load_recipe
from ddm_ray.data.prepare.records import rows_store
from ddm_ray.data.prepare.stage import list_source, prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.sources import Unit, open_source
from ddm_ray.data.sources.chunks import MIN_PART_ROWS
from ddm_ray.jobs.status import status
from ddm_ray.run.graph import ROWS
from ddm_ray.run.run import Run
from tests.data.rows import read_artifact
from tests.data.sources.test_sources import write_folder

pytestmark = pytest.mark.contract

COUNT = 400


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    write_folder(folder, COUNT)
    return folder


def begin(folder: Path, photos: Path) -> Run:
    settings = (f"data.source={photos}", "data.num_classes=3", "embedder.dim=8")
    return Run.create(str(folder / "run"), load_recipe("tiny", settings))


def in_one_file(photos: Path, kind: str, folder: Path) -> Path:
    """The same images in one tar or parquet file, in the order of their names."""
    images = sorted(path for path in photos.rglob("*.png"))
    labels = sorted({path.parent.name for path in images})
    folder.mkdir()
    if kind == "parquet":
        columns = {"image": [path.read_bytes() for path in images], "label": [path.parent.name for path in images]}
        table = pa.table({**columns, "label": [labels.index(name) for name in columns["label"]]})
        pq.write_table(table, folder / "all.parquet")
    else:
        with tarfile.open(folder / "all.tar", "w") as tar:
            for number, path in enumerate(images):
                tar.add(path, f"{number:04d}.png")
                label = folder / "label"
                label.write_text(str(labels.index(path.parent.name)))
                tar.add(label, f"{number:04d}.cls")
                label.unlink()
    return folder


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_progress_moves_and_a_kill_costs_one_part(tmp_path: Path, photos: Path, kind: str) -> None:
    source = photos if kind == "folder" else in_one_file(photos, kind, tmp_path / kind)
    run, alone = begin(tmp_path, source), begin(tmp_path / "alone", photos)
    seen: list[float] = []

    def dies(fraction: float, _: str) -> None:
        seen.append(fraction)
        if fraction > 0.5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        prepare(run, dies, execute=serial)
    moved = sorted({fraction for fraction in seen if fraction})
    assert len(moved) == 2 and 0.2 < moved[0] < 0.5 < moved[1] < 0.9
    chunks = status(run, ROWS).chunks
    assert chunks is not None and chunks.units == (4 if kind == "folder" else 1)
    assert chunks.units_done == (2 if kind == "folder" else 0)
    kept = {name for name in run.store.sizes(ROWS) if name.startswith("part-")}
    manifest = prepare(run, execute=serial)
    assert len(kept) == 2 and kept < manifest.files.keys() and len(manifest.files) == 4
    assert manifest.info["rows"] == COUNT
    prepare(alone, execute=serial)
    columns = ["label", "data", "content_hash"]
    assert (
        read_artifact(run, ROWS, columns)
        .sort_by("content_hash")
        .equals(read_artifact(alone, ROWS, columns).sort_by("content_hash"))
    )


def test_a_plan_of_one_large_part_goes_on_as_it_was(tmp_path: Path, photos: Path) -> None:
    run, parted = begin(tmp_path / "old", photos), begin(tmp_path / "new", photos)
    source = open_source(run.config.data)
    plan = list_source(run.config, str(photos), source, 4096)
    assert [len(unit.files) for unit in plan.units] == [MIN_PART_ROWS] * 3 + [COUNT - 3 * MIN_PART_ROWS]
    files = [(file, size) for unit in plan.units for file, size in zip(unit.files, unit.sizes, strict=True)]
    paths, sizes = zip(*files, strict=True)
    older = replace(plan, units=(Unit("0-400", sum(sizes), paths, sizes),), numbered=None)
    rows_store(run, ROWS).plan(lambda: older)
    assert len(prepare(run, execute=serial).files) == 1
    prepare(parted, execute=serial)
    columns = ["id", "label", "data", "content_hash", "split"]
    assert read_artifact(run, ROWS, columns).equals(read_artifact(parted, ROWS, columns))
