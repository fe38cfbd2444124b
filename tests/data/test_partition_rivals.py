"""Two partitions of one run at once: what one has finished the other neither replaces nor unmakes."""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ddm_ray.data import clustering
from ddm_ray.data import partition as stage
from ddm_ray.data.partition import partition
from ddm_ray.data.partition_report import Report, Survey
from ddm_ray.data.partition_state import unmake_shard
from ddm_ray.errors import CorruptArtifact, DataError
from ddm_ray.storage.manifest import NAME
from ddm_ray.storage.run import CENTROIDS, PARTITION, ROWS, Run, owner_rows, shard
from tests.conftest import ROOT
from tests.data.groups import rows, run_of
from tests.data.partitions import NOTES, contents, copy_of


def inodes(run: Run) -> dict[str, int]:
    return {key: Path(run.url, PARTITION, key).stat().st_ino for key in run.store.sizes(PARTITION)}


@pytest.mark.parametrize("note", NOTES)
def test_a_rival_that_finishes_first_is_left_alone(note, parted, tmp_path):
    run = copy_of(parted, tmp_path / "run", PARTITION)
    theirs: list[dict[str, int]] = []

    def overtaken(fraction: float, told: str) -> None:
        if note in told and not theirs:
            partition(Run.open(run.url))
            theirs.append(inodes(run))

    partition(run, overtaken)
    assert contents(run) == contents(parted)
    found = inodes(run)
    rewritten = {key for key, inode in theirs[0].items() if found[key] != inode}
    # The same centroids may be written once more under the name of their content.
    assert {key for key in rewritten if not key.startswith("centroids/centroids-")} == set()


def test_two_processes_at_once_end_in_the_same_bytes(parted, tmp_path):
    run = copy_of(parted, tmp_path / "run", PARTITION)
    program = (
        "import sys\nfrom ddm_ray.data.partition import partition\nfrom ddm_ray.storage.run import Run\n"
        "partition(Run.open(sys.argv[1]))"
    )
    rivals = [subprocess.Popen([sys.executable, "-c", program, run.url], cwd=ROOT) for _ in range(2)]
    assert [rival.wait(timeout=120) for rival in rivals] == [0, 0]
    assert contents(run) == contents(parted)


def test_other_centroids_of_a_rival_count_if_they_were_first(parted, tmp_path, monkeypatch):
    """Another machine's k-means ends in other bits; its clusters are what all is made of."""
    run = copy_of(parted, tmp_path / "run", PARTITION)
    fit = stage.fit

    def moved(*args):
        features, centroids, num_sampled = fit(*args)
        return features, dataclasses.replace(centroids, coarse_KD=centroids.coarse_KD * np.float32(1.01)), num_sampled

    def fit_after_a_rival(*args):
        found = fit(*args)
        monkeypatch.setattr(stage, "fit", moved)
        partition(Run.open(run.url))
        return found

    monkeypatch.setattr(stage, "fit", fit_after_a_rival)
    whole = partition(run)
    [name] = run.require(CENTROIDS).files
    assert [*parted.require(CENTROIDS).files] != [name]
    assert {*run.store.sizes(CENTROIDS)} == {name, NAME}
    for listed in whole.files:
        run.read(PARTITION, listed)
    assert run.require(shard(0)).info["centroids"] == run.require(CENTROIDS).digest


def test_a_report_of_another_machine_stays_with_its_partition(parted, tmp_path, monkeypatch):
    """Pictures of another matplotlib: the rival writes its report and finishes while this one is about to."""
    run = copy_of(parted, tmp_path / "run", PARTITION)
    run_finished, overtaken = Run.finished, []

    def report(self, *args) -> Report:
        found = make(self, *args)
        return dataclasses.replace(found, files=found.files | {"clusters.png": b"other pixels"})

    def finished_then_a_rival(self, artifact):
        found = run_finished(self, artifact)
        if artifact == PARTITION and run.store.exists(f"{shard(1)}/{NAME}") and not overtaken:
            overtaken.append(artifact)
            with monkeypatch.context() as other:
                other.setattr(Survey, "report", make)
                partition(Run.open(run.url))
                assert run_finished(run, PARTITION)
        return found

    make = Survey.report
    monkeypatch.setattr(Survey, "report", report)
    monkeypatch.setattr(Run, "finished", finished_then_a_rival)
    partition(run)
    assert overtaken
    assert contents(run) == contents(parted)


def test_a_shard_is_unmade_only_if_it_does_not_count(parted, tmp_path, monkeypatch):
    run = copy_of(parted, tmp_path / "run")
    identity, digest = run.identity(shard(0)), run.require(CENTROIDS).digest
    unmake_shard(run, 0, digest, identity)
    assert run.finished(shard(0))
    # Committed by a rival right after the look.
    data = run.store.read(f"{shard(0)}/{NAME}")
    run.store.delete_one(f"{shard(0)}/{NAME}")
    look = run.store.exists

    def exists_then_a_rival(key: str) -> bool:
        found = look(key)
        run.store.write(key, data)
        return found

    monkeypatch.setattr(run.store, "exists", exists_then_a_rival)
    unmake_shard(run, 0, digest, identity)
    assert run.finished(shard(0))
    unmake_shard(run, 0, "0" * 16, identity)
    assert not run.finished(shard(0))


@pytest.mark.parametrize("name", ["report/report.html", "report/clusters.png", "centroids/_MANIFEST.json", "centroids"])
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_finished_partition_that_lacks_something_is_told_in_one_line(name, how, parted, tmp_path):
    run = copy_of(parted, tmp_path / "run")
    if name == "centroids":
        name = f"centroids/{next(iter(run.require(CENTROIDS).files))}"
    key = f"{PARTITION}/{name}"
    data = run.store.read(key)
    run.store.delete_one(key)
    if how == "cut":
        run.store.write(key, data[:-9])
    with pytest.raises(CorruptArtifact) as error:
        partition(run)
    assert str(error.value) == (
        f"{run.url}/{key}: gone or altered, though the partition lists it;"
        f" delete {run.url}/{PARTITION}/{NAME}, then: ddm partition {run.url}"
    )
    run.store.delete_one(f"{PARTITION}/{NAME}")
    partition(run)
    assert contents(run) == contents(parted)


def test_given_shards_made_twice_at_once(tmp_path):
    run = run_of(str(tmp_path / "run"), rows(), "partition.method=given", artifact=owner_rows(1))
    theirs: list[dict[str, int]] = []

    def overtaken(fraction: float, told: str) -> None:
        if "shard 1" in told and not theirs:
            partition(Run.open(run.url), cluster=1)
            theirs.append(inodes(run))

    manifest = partition(run, overtaken, cluster=1)
    assert manifest == run.require(shard(1))
    assert [inodes(run)] == theirs


def test_given_shards_of_other_classes_are_refused(tmp_path):
    settings = ("partition.method=given",)
    run = run_of(str(tmp_path / "run"), rows(), *settings, artifact=owner_rows(0))
    manifest = partition(run, cluster=0)
    for cluster, counts in ((0, manifest.info["counts_C"]), (1, manifest.info["counts_C"][:-1])):
        run.store.delete_one(f"{shard(cluster)}/{NAME}")
        info = manifest.info | {"cluster": cluster, "counts_C": counts}
        run.commit_records(shard(cluster), manifest.files, info)
    with pytest.raises(DataError, match=r"cluster=001: counts 9 classes, this run has 10; .* --cluster 1"):
        partition(run)
    assert not run.finished(PARTITION)


def test_the_next_part_is_read_while_one_is_used_and_no_more(parted, monkeypatch):
    there = clustering.Rows(parted, ROWS)
    begun = {name: threading.Event() for name in there.names}
    read = there._table

    def begin(name: str, columns: list[str] | None) -> pa.Table:
        begun[name].set()
        return read(name, columns)

    monkeypatch.setattr(there, "_table", begin)
    seen = 0
    for number, table in enumerate(there.parts([], lambda share, note: None)):
        seen += table.num_rows
        assert all(begun[name].wait(10) for name in there.names[: number + 2])
        assert not any(begun[name].is_set() for name in there.names[number + 2 :])
    assert seen == there.manifest.info["rows"]
    assert len(there.names) > 2
