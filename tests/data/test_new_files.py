"""Files that are new to runs of older versions, which didn't ask for a split and kept names as folders have them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddm_ray.config import load_recipe
from ddm_ray.data.prepare.new_files import list_new
from ddm_ray.data.prepare.records import RowsStore, rows_store
from ddm_ray.data.prepare.stage import list_source
from ddm_ray.data.sources import open_source
from ddm_ray.errors import DataError
from ddm_ray.run.graph import ROWS
from ddm_ray.run.run import Run


def begun_by_an_older_version(folder: Path, **changed: Any) -> RowsStore:
    """The rows of a run that took files of all splits without asking."""
    config = load_recipe("tiny", (f"data.source={folder / 'photos'}", "data.num_classes=2"))
    run, name = Run.create(str(folder / "run"), config), config.data.source
    listed = open_source(config.data.model_copy(update={"split": "all"}), name)
    rows = rows_store(run, ROWS)
    rows.plan(lambda: replace(list_source(config, name, listed, 100), **changed))
    return rows


def test_a_run_of_all_splits_takes_more_files_of_all(tmp_path: Path) -> None:
    paths = [f"cat/{split}/0.png" for split in ("train", "test")]
    for path in (*paths, "dog/train/0.png"):
        (tmp_path / "photos" / path).parent.mkdir(parents=True)
        (tmp_path / "photos" / path).write_bytes(b"0")
    earlier = begun_by_an_older_version(tmp_path)
    (tmp_path / "photos/dog/test").mkdir()
    (tmp_path / "photos/dog/test/1.png").write_bytes(b"1")
    assert list_new([earlier], str(tmp_path / "photos")).files == {"dog/test/1.png": 1}
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "photos/dog/test")
    shutil.rmtree(tmp_path / "photos/cat/test")
    earlier = begun_by_an_older_version(tmp_path)
    more = tmp_path / "photos/cat/test/0.png"
    more.parent.mkdir()
    more.write_bytes(b"0")
    with pytest.raises(DataError, match="its files are of splits: 1 of test, 2 of train; "):
        list_new([earlier], str(tmp_path / "photos"))


def test_classes_of_an_older_run_may_be_in_another_form(tmp_path: Path) -> None:
    for name in ("bar", "cafe\u0301"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "0.png").write_bytes(b"0")
    earlier = begun_by_an_older_version(tmp_path, classes=("bar", "cafe\u0301"))
    (tmp_path / "photos/bar/1.png").write_bytes(b"1")
    assert list_new([earlier], str(tmp_path / "photos")).files == {"bar/1.png": 1}
