"""A partition that was stopped, killed or spoilt, and shards of another one: what counts is made of these rows."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddm_ray.data.partition.stage import partition
from ddm_ray.errors import CorruptArtifact, DriftError, MissingArtifact
from ddm_ray.run.graph import CENTROIDS, PARTITION, ROWS, shard
from tests.conftest import ROOT
from tests.data.groups import FOUR, rows, run_of
from tests.data.partitions import NOTES, contents, copy_of
from tests.data.rows import commit_rows, commit_tables
from tests.infos import info_of

pytestmark = pytest.mark.contract

SHARDS = [shard(0), shard(1)]


@pytest.mark.parametrize("note", NOTES)
def test_what_an_interrupted_partition_left_is_continued_with(note, parted, tmp_path):
    run = copy_of(parted, tmp_path / "run", PARTITION)

    def stop(fraction: float, current_note: str) -> None:
        if note in current_note:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        partition(run, stop, with_report=False)
    assert not run.finished(PARTITION)
    made = [artifact for artifact in (CENTROIDS, *SHARDS) if run.finished(artifact)]
    assert len(made) == 0 if note in NOTES[:2] else 1 + NOTES[-2:].index(note) if note in NOTES[-2:] else 1
    seen = {key: Path(run.url, PARTITION, key).stat().st_ino for key in contents(run) if not key.startswith("_files/")}
    assert any(key.endswith(".parquet") for key in seen) == (note in NOTES[-2:])
    partition(run, with_report=False)
    assert contents(run) == contents(parted)
    # What was finished wasn't made again.
    assert all(Path(run.url, PARTITION, key).stat().st_ino == inode for key, inode in seen.items())


KILLED = """
import os, signal, sys
from ddm_ray.data.partition.stage import partition
from ddm_ray.run.run import Run

base, *notes = sys.argv[1:]
for number, note in enumerate(notes):
    child = os.fork()
    if not child:
        def kill(fraction, current_note):
            if note in current_note:
                os.kill(os.getpid(), signal.SIGKILL)
        partition(Run.open(f"{base}-{number}"), kill, with_report=False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9, note
"""


def test_killed_anywhere_the_same_command_ends_in_the_same_bytes(parted, tmp_path):
    runs = [copy_of(parted, tmp_path / f"run-{number}", PARTITION) for number in range(len(NOTES))]
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), *NOTES]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    for run in runs:
        assert not run.finished(PARTITION)
        partition(run, with_report=False)
        assert contents(run) == contents(parted)


def test_a_shard_of_other_centroids_is_made_again(parted, tmp_path):
    """test_damage has what is damaged."""
    run = copy_of(parted, tmp_path / "run")
    run.store.delete_one(f"{PARTITION}/_MANIFEST.json")
    manifest = run.require(shard(0))
    run.store.delete_one(f"{shard(0)}/_MANIFEST.json")
    run.commit_records(shard(0), manifest.files, info_of(shard(0), **{**manifest.info, "centroids": "0" * 16}))
    partition(run, with_report=False)
    assert contents(run) == contents(parted)


@pytest.mark.parametrize("how", [(), ("partition.max_share=0.3",), ("partition.method=random",)])
def test_a_shard_that_was_deleted_is_made_again_alone(how, tmp_path):
    run = run_of(str(tmp_path / "run"), rows(), *FOUR, *how)
    manifest, before = partition(run, with_report=False), contents(run)
    run.store.delete(shard(1))
    kept = Path(run.url, shard(0), "train-00000.parquet").stat().st_ino
    assert partition(run, with_report=False) == manifest
    assert contents(run) == before
    assert Path(run.url, shard(0), "train-00000.parquet").stat().st_ino == kept


def test_a_shard_made_again_from_rows_that_are_gone(tmp_path):
    run = run_of(str(tmp_path / "run"), rows(), *FOUR)
    partition(run, with_report=False)
    run.store.delete(ROWS)
    partition(run, with_report=False)
    run.store.delete(shard(1))
    with pytest.raises(MissingArtifact, match="make rows"):
        partition(run, with_report=False)


def test_a_stale_shard_is_neither_read_nor_committed(tmp_path):
    run = run_of(str(tmp_path / "run"), rows(), *FOUR)
    partition(run, with_report=False)
    shutil.copytree(Path(run.url, PARTITION), tmp_path / "old")
    run.store.delete(PARTITION)
    run.store.delete(ROWS)
    other = rows(seed=1)
    commit_tables(run, [other.table(run.config)])
    fresh = copy_of(run, tmp_path / "fresh")
    partition(fresh, with_report=False)

    # Put back before, beside what an unfinished partition has, and over a finished one.
    shutil.copytree(tmp_path / "old", Path(run.url, PARTITION))
    shutil.copytree(tmp_path / "old/shards/cluster=003", Path(run.url, f"{PARTITION}/shards/cluster=007"))
    with pytest.raises(DriftError, match="input rows"):
        partition(run, with_report=False)
    for artifact in (CENTROIDS, shard(0)):
        with pytest.raises(DriftError, match=r"was made otherwise: input rows: .*; delete .* and make partition again"):
            run.require(artifact)
    run.store.delete_one(f"{PARTITION}/_MANIFEST.json")
    partition(run, with_report=False)
    run.store.delete(f"{PARTITION}/shards/cluster=007")
    assert contents(run) == contents(fresh)
    shutil.rmtree(Path(run.url, shard(0)))
    shutil.copytree(tmp_path / "old/shards/cluster=000", Path(run.url, shard(0)))
    with pytest.raises(DriftError):
        run.require(shard(0))
    partition(run, with_report=False)
    assert contents(run) == contents(fresh)


def test_rows_replaced_while_they_are_read_are_refused(parted, tmp_path):
    run, other = copy_of(parted, tmp_path / "run", PARTITION), tmp_path / "other"
    commit_rows(str(other), ("data.source=digits",), chunk_rows=500)

    def replace(fraction: float, note: str) -> None:
        if note == "k-means of 1,632 rows" or "k-means" in note:
            shutil.rmtree(Path(run.url, ROWS))
            shutil.copytree(other / ROWS, Path(run.url, ROWS))

    with pytest.raises(CorruptArtifact, match=r"rows/part-.*: gone, though its manifest lists it"):
        partition(run, replace, with_report=False)
    assert not run.store.exists(f"{PARTITION}/_MANIFEST.json")
