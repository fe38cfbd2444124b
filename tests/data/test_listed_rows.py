"""Rows of very many parts, whose manifest names a list of them, are as good as those that it names one by one."""

from pathlib import Path

import pytest

from ddm_ray.config import load_recipe
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.errors import CorruptArtifact
from ddm_ray.jobs.examination import examine
from ddm_ray.jobs.status import survey
from ddm_ray.run import listing
from ddm_ray.run.garbage import leftovers
from ddm_ray.run.graph import PARTITION, ROWS, owner_rows
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from tests.data.damaged_runs import make_images
from tests.data.rows import commit_rows, flip_byte
from tests.store_meter import StoreMeter

pytestmark = pytest.mark.contract


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest names three files at most."""
    monkeypatch.setattr(listing, "MAX_NAMED", 3)


def listed_parts(run: Run) -> list[str]:
    """Parts of the rows by their list, which is the only place that names them."""
    manifest = run.require(ROWS)
    assert not any(name.startswith("part-") for name in manifest.files)
    return [name for name in listing.with_all_files(run, manifest).files if name.startswith("part-")]


def test_the_same_shards_are_made_of_them(tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with duplicates that are dropped: these are a file beside the parts."""
    runs = []
    for name, most in (("listed", 3), ("named", 10_000)):
        monkeypatch.setattr(listing, "MAX_NAMED", most)
        run = make_images(tmp_path / name, 0)
        partition(run)
        runs.append(run)
    listed, named = runs
    assert len(listed_parts(listed)) > 3
    assert {name.partition("/")[0] for name in listed.require(ROWS).files} == {"_files", "duplicates.parquet"}
    assert not any(name.startswith("_files") for name in named.require(ROWS).files)
    for artifact in (ROWS, PARTITION):
        assert listed.require(artifact).digest == named.require(artifact).digest
    assert not leftovers(listed)
    assert prepare(listed, execute=serial).digest == named.require(ROWS).digest


def test_an_older_run_is_read_by_its_manifest_alone(tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_NAMED", 10_000)
    run = commit_rows(str(tmp_path / "run"), chunk_rows=200)
    monkeypatch.setattr(listing, "MAX_NAMED", 1)
    partition(run)
    assert {each.state for each in survey(run)[:2]} == {"finished"}


def test_a_part_that_is_gone_or_altered_is_named(tmp_path: Path, few: None) -> None:
    run = commit_rows(str(tmp_path / "run"), chunk_rows=200)
    first, second, *_ = listed_parts(run)
    assert all(each.error is None for each in examine(run, deep=True))
    flip_byte(run, f"{ROWS}/{first}")
    assert all(each.error is None for each in examine(run))
    assert f"{first}: checksum differs" in str({each.artifact: each.error for each in examine(run, deep=True)}[ROWS])
    with pytest.raises(CorruptArtifact, match=f"{ROWS}/{first}: checksum differs"):
        partition(run)
    run.store.delete_one(f"{ROWS}/{second}")
    assert f"{second}: gone or cut short" in str({each.artifact: each.error for each in examine(run)}[ROWS])
    [name] = run.require(ROWS).files
    run.store.delete_one(f"{ROWS}/{name}")
    assert survey(run)[0].state == "damaged"


def test_a_status_lists_none_of_them(tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run = commit_rows(str(tmp_path / "run"), chunk_rows=50)
    assert len(listed_parts(run)) > 30
    meter = StoreMeter(monkeypatch)
    assert survey(run)[0].state == "finished"
    assert meter.requests["list"] and not [name for name in meter.listed if "part-" in name]


def test_an_owner_may_give_such_a_manifest_alone(tmp_path: Path, few: None) -> None:
    run, centre = (
        Run.create(str(tmp_path / name), load_recipe("tiny", ("partition.method=given",))) for name in ("own", "centre")
    )
    prepare(run, cluster=0, source="digits", chunk_rows=200, execute=serial)
    key = f"{owner_rows(0)}/{NAME}"
    centre.store.write(key, run.store.read(key))
    assert {each.artifact: each.state for each in survey(centre)}[owner_rows(0)] == "finished"
    assert {each.artifact: each.error for each in examine(centre)}[owner_rows(0)] is None
