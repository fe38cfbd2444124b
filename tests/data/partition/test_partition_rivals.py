"""Two partitions of one run at once: what one has finished the other neither replaces nor deletes."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ddm_ray.data.partition import stage
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.partition.state import ExpectedShard
from ddm_ray.errors import DataError
from ddm_ray.run.graph import CENTROIDS, PARTITION, ROWS, owner_rows, shard
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from tests.conftest import ROOT
from tests.data.groups import rows, run_of
from tests.data.partitions import NOTES, contents, copy_of
from tests.infos import info_of

pytestmark = pytest.mark.contract


def inodes(run: Run) -> dict[str, int]:
    return {key: Path(run.url, PARTITION, key).stat().st_ino for key in run.store.sizes(PARTITION)}


@pytest.mark.parametrize("note", NOTES)
def test_a_rival_that_finishes_first_is_left_alone(note, parted, tmp_path):
    run = copy_of(parted, tmp_path / "run", PARTITION)
    theirs: list[dict[str, int]] = []

    def overtaken(fraction: float, current_note: str) -> None:
        if note in current_note and not theirs:
            partition(Run.open(run.url), with_report=False)
            theirs.append(inodes(run))

    partition(run, overtaken, with_report=False)
    assert contents(run) == contents(parted)
    final_inodes = inodes(run)
    rewritten = {key for key, inode in theirs[0].items() if final_inodes[key] != inode}
    # The same centroids may be written once more under the name of their content.
    assert {key for key in rewritten if not key.startswith("centroids/centroids-")} == set()


def test_two_processes_at_once_end_in_the_same_bytes(parted, tmp_path):
    run = copy_of(parted, tmp_path / "run", PARTITION)
    program = (
        "import sys\nfrom ddm_ray.data.partition.stage import partition\nfrom ddm_ray.run.run import Run\n"
        "partition(Run.open(sys.argv[1]), with_report=False)"
    )
    rivals = [subprocess.Popen([sys.executable, "-c", program, run.url], cwd=ROOT) for _ in range(2)]
    assert [rival.wait(timeout=120) for rival in rivals] == [0, 0]
    assert contents(run) == contents(parted)


def test_other_centroids_of_a_rival_count_if_they_were_first(parted, tmp_path, monkeypatch):
    """Another machine's k-means ends in other bits; its clusters are what all is made of."""
    run = copy_of(parted, tmp_path / "run", PARTITION)
    fit = stage.fit_clustering

    def moved(*args):
        clustering, num_sampled = fit(*args)
        centroids = dataclasses.replace(
            clustering.centroids, coarse_KD=clustering.centroids.coarse_KD * np.float32(1.01)
        )
        return dataclasses.replace(clustering, centroids=centroids), num_sampled

    def fit_after_a_rival(*args):
        fitted = fit(*args)
        monkeypatch.setattr(stage, "fit_clustering", moved)
        partition(Run.open(run.url), with_report=False)
        return fitted

    monkeypatch.setattr(stage, "fit_clustering", fit_after_a_rival)
    manifest = partition(run, with_report=False)
    [name] = run.require(CENTROIDS).files
    assert [*parted.require(CENTROIDS).files] != [name]
    assert {*run.store.sizes(CENTROIDS)} == {name, NAME}
    for listed in manifest.files:
        run.read(PARTITION, listed)
    assert run.require(shard(0)).info["centroids"] == run.require(CENTROIDS).digest


def test_a_shard_is_invalidated_only_if_it_does_not_count(parted, tmp_path, monkeypatch):
    run = copy_of(parted, tmp_path / "run")
    expected = ExpectedShard(run, 0, run.require(CENTROIDS).digest, run.identity(shard(0)), (run, ROWS))
    expected.invalidate()
    assert run.finished(shard(0))
    # Committed by a concurrent writer right after the look.
    data = run.store.read(f"{shard(0)}/{NAME}")
    run.store.delete_one(f"{shard(0)}/{NAME}")
    look = run.store.exists

    def exists_then_committed(key: str) -> bool:
        existed = look(key)
        run.store.write(key, data)
        return existed

    monkeypatch.setattr(run.store, "exists", exists_then_committed)
    expected.invalidate()
    assert run.finished(shard(0))
    dataclasses.replace(expected, centroids="0" * 16).invalidate()
    assert not run.finished(shard(0))


def test_given_shards_made_twice_at_once(tmp_path):
    run = run_of(str(tmp_path / "run"), rows(), "partition.method=given", artifact=owner_rows(1))
    theirs: list[dict[str, int]] = []

    def overtaken(fraction: float, note: str) -> None:
        if "shard 1" in note and not theirs:
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
        info = info_of(shard(0), **{**manifest.info, "cluster": cluster, "counts_C": counts})
        run.commit_records(shard(cluster), manifest.files, info)
    with pytest.raises(DataError, match=r"counts 9 classes, this run has 10; .*; make partition/shards/cluster=001"):
        partition(run, with_report=False)
    assert not run.finished(PARTITION)
