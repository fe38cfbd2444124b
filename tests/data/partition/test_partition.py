import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import safetensors.numpy

from ddm_ray.config import load_recipe
from ddm_ray.data.partition.stage import partition
from ddm_ray.data.schema import data_dtype, embeddings, images, read_parquet
from ddm_ray.errors import (
    ConfigError,
    DataError,
    DDMError,
    DriftError,
    MissingArtifact,
)
from ddm_ray.run.graph import CENTROIDS, PARTITION, ROWS, owner_rows, shard
from ddm_ray.run.manifest import sha256
from ddm_ray.run.run import Run
from tests.conftest import ROOT
from tests.data.groups import FOUR, rows, run_of
from tests.data.partitions import contents
from tests.data.rows import commit_rows, commit_tables, read_artifact

pytestmark = pytest.mark.contract

SHARDS = [shard(0), shard(1)]
GIVEN = ("partition.method=given",)


def centroids_of(run: Run) -> bytes:
    [name] = run.require(CENTROIDS).files
    data = run.read(CENTROIDS, name)
    assert name == f"centroids-{sha256(data)[:8]}.safetensors"
    return data


def split_of(run: Run, artifact: str, split: str) -> pa.Table:
    manifest = run.require(artifact)
    names = sorted(name for name in manifest.files if name.startswith(split))
    return pa.concat_tables(read_parquet(run.read(artifact, name, manifest), name) for name in names)


def test_every_row_is_in_the_shard_of_its_nearest_centroid_as_it_was(parted):
    table = read_artifact(parted, ROWS)
    centroids = safetensors.numpy.load(centroids_of(parted))
    distance_NK = ((embeddings(table).astype(np.float64)[:, None] - centroids["coarse_KD"]) ** 2).sum(-1)
    columns = [table[name].to_pylist() for name in ("id", "split", "data", "label")]
    expected = {row[0]: (int(cluster), *row[1:]) for *row, cluster in zip(*columns, distance_NK.argmin(1), strict=True)}
    stored = {}
    for cluster, artifact in enumerate(SHARDS):
        for split in ("train", "heldout"):
            split_rows = split_of(parted, artifact, split)
            for row in split_rows.to_pylist():
                stored[row["id"]] = (cluster, split, row["data"], row["label"])
    assert stored == expected
    assert centroids["fine_FD"].shape == (16, 8)
    assert set(centroids["fine_to_coarse_F"]) == {0, 1}


def test_the_manifests_count_the_training_rows(parted):
    info = parted.require(PARTITION).info
    counts_CK = np.zeros((10, 2), int)
    for cluster, artifact in enumerate(SHARDS):
        train, heldout = (split_of(parted, artifact, split) for split in ("train", "heldout"))
        np.add.at(counts_CK[:, cluster], train["label"].to_numpy(), 1)
        assert parted.require(artifact).info == {
            "cluster": cluster,
            "rows": train.num_rows + heldout.num_rows,
            "rows_train": train.num_rows,
            "rows_heldout": heldout.num_rows,
            "counts_C": counts_CK[:, cluster].tolist(),
            "data_std": pytest.approx(images(train, parted.config.data).std(dtype=np.float64)),
            "centroids": parted.require(CENTROIDS).digest,
        }
    assert info["counts_CK"] == counts_CK.tolist()
    assert info["rows_K"] == counts_CK.sum(0).tolist()
    assert data_dtype(parted.config.data) == np.uint8


def test_the_partition_lists_all_that_it_consists_of(parted):
    listed = parted.require(PARTITION).files
    below = {"centroids/_MANIFEST.json", *(f"shards/cluster=00{cluster}/_MANIFEST.json" for cluster in (0, 1))}
    assert below == listed.keys()
    for name in listed:
        parted.read(PARTITION, name)


@pytest.mark.parametrize(
    "how", [(), ("partition.max_share=0.3",), ("partition.method=pixels",), ("partition.method=random",)]
)
def test_equal_rows_in_another_order_give_equal_bytes(how, tmp_path):
    truth = rows()
    first = run_of(str(tmp_path / "first"), truth, *FOUR, *how, "partition.sample_rows=700")
    shuffled = truth.take(np.random.default_rng(1).permutation(len(truth.ids)))
    other = run_of(str(tmp_path / "other"), shuffled, *FOUR, *how, "partition.sample_rows=700", part_rows=230)
    partition(first, with_report=False)
    partition(other, with_report=False)
    assert contents(first).keys() == contents(other).keys()
    for key, content in contents(other).items():
        # These name their input's digest, which is of the rows in their order.
        if not key.endswith("_MANIFEST.json"):
            assert content == contents(first)[key], key


def test_the_seed_draws_where_k_means_begins(parted, tmp_path):
    sampled = [
        commit_rows(str(tmp_path / f"{seed}{again}"), ("partition.sample_rows=200", f"partition.seed={seed}"))
        for seed, again in ((0, 0), (0, 1), (1, 0))
    ]
    centroids = [partition(run, with_report=False) and centroids_of(run) for run in sampled]
    assert centroids[0] == centroids[1]
    assert len({*centroids, centroids_of(parted)}) == 3
    assert sampled[0].require(CENTROIDS).info == {"rows_sampled": 200, "num_fine": 16}


def test_heldout_rows_move_no_centroid(tmp_path):
    truth = rows()
    complete = run_of(str(tmp_path / "whole"), truth, *FOUR)
    train = np.flatnonzero(np.array(truth.table(complete.config)["split"].to_pylist()) == "train")
    other = run_of(str(tmp_path / "train"), truth.take(train), *FOUR)
    for run in (complete, other):
        partition(run, with_report=False)
    assert len(train) < len(truth.ids)
    assert centroids_of(complete) == centroids_of(other)


def test_a_partition_needs_rows(tmp_path):
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny"))
    with pytest.raises(MissingArtifact, match="make rows"):
        partition(run, with_report=False)


@pytest.mark.parametrize("method", ["embeddings", "pixels", "random"])
def test_more_clusters_than_rows(method, tmp_path):
    settings = ("partition.num_clusters=40", "partition.num_fine=40", "expert.train.batch=1")
    run = run_of(str(tmp_path / "run"), rows(num_rows=30), *settings, f"partition.method={method}")
    num_train = run.require(ROWS).info["rows_train"]
    with pytest.raises(DataError) as error:
        partition(run, with_report=False)
    assert str(error.value) == (
        f"{run.url}: partition.num_clusters is 40, but there are only {num_train} training rows; begin a run with fewer"
    )
    assert not run.store.sizes(PARTITION)


def test_too_few_different_rows(tmp_path):
    truth = rows(num_rows=60)
    truth.embeddings_ND[:] = truth.embeddings_ND[np.arange(60) % 2]
    run = run_of(str(tmp_path / "run"), truth, *FOUR)
    with pytest.raises(DataError, match=f"{run.url}: 4 clusters need .* 2 were found; use fewer partition"):
        partition(run, with_report=False)
    assert not run.store.sizes(PARTITION)


def test_a_cluster_without_training_rows(tmp_path):
    truth = rows((1.0,))  # all of class 0
    run = run_of(str(tmp_path / "run"), truth, "partition.method=label")
    with pytest.raises(DataError, match=r"clusters \[1\] have no training row: .*; use fewer partition.num_clusters"):
        partition(run, with_report=False)
    assert not run.store.sizes(PARTITION)


def test_given_shards_are_made_alone_and_collected_without_their_rows(tmp_path):
    owners = [run_of(str(tmp_path / str(k)), rows(seed=k), *GIVEN, artifact=owner_rows(k)) for k in (0, 1)]
    for cluster, run in enumerate(owners):
        manifest = partition(run, cluster=cluster)
        assert manifest == run.require(shard(cluster)) == partition(run, cluster=cluster)
        assert manifest.info["rows_train"] == run.require(owner_rows(cluster)).info["rows_train"]
        assert manifest.info["centroids"] is None
        ids = {*split_of(run, shard(cluster), "train")["id"].to_pylist()}
        assert ids < set(rows(seed=cluster).ids)
    centre = Run.create(str(tmp_path / "centre"), owners[0].config)
    with pytest.raises(
        MissingArtifact, match=r"no finished partition/shards/cluster=000 yet; first make rows/cluster=000$"
    ):
        partition(centre)
    for cluster, run in enumerate(owners):
        centre.store.write(f"{shard(cluster)}/_MANIFEST.json", run.store.read(f"{shard(cluster)}/_MANIFEST.json"))
    collected = partition(centre)
    infos = [run.require(shard(cluster)).info for cluster, run in enumerate(owners)]
    assert collected.info["rows_K"] == [info["rows_train"] for info in infos]
    assert np.array(collected.info["counts_CK"]).T.tolist() == [info["counts_C"] for info in infos]
    assert partition(centre) == collected
    assert not centre.store.exists(f"{CENTROIDS}/_MANIFEST.json")

    # An owner who prepared again has another shard than the partition knows.
    again = run_of(str(tmp_path / "again"), rows(seed=5), *GIVEN, artifact=owner_rows(1))
    partition(again, cluster=1)
    centre.store.write(f"{shard(1)}/_MANIFEST.json", again.store.read(f"{shard(1)}/_MANIFEST.json"))
    with pytest.raises(
        DriftError, match=r"made of another shards/cluster=001/_MANIFEST.json; delete .*/_MANIFEST.json"
    ):
        partition(centre)


def test_a_given_shard_of_other_rows_is_drift(tmp_path):
    run = run_of(str(tmp_path / "run"), rows(), *GIVEN, artifact=owner_rows(1))
    partition(run, cluster=1)
    run.store.delete(owner_rows(1))
    commit_tables(run, [rows(seed=3).table(run.config, embedding=False)], owner_rows(1))
    with pytest.raises(DriftError, match="make partition/shards/cluster=001"):
        partition(run, cluster=1)


@pytest.mark.parametrize(
    ("settings", "cluster", "error", "message"),
    [
        ((), 0, ConfigError, r"cluster is for shards that are given \(partition.method given\); leave it out"),
        (GIVEN, 2, ConfigError, "cluster 2: this run has clusters 0 to 1"),
        (GIVEN, -1, ConfigError, "cluster -1: this run has clusters 0 to 1"),
        (GIVEN, 1, MissingArtifact, "make rows/cluster=001$"),
    ],
)
def test_clusters_that_cannot_be_made_alone(settings, cluster, error, message, tmp_path):
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", settings))
    with pytest.raises(error, match=message) as failure:
        partition(run, cluster=cluster)
    assert isinstance(failure.value, DDMError) and "\n" not in str(failure.value)


PEAK = """
import re, sys
from ddm_ray.data.partition.stage import partition
from ddm_ray.run.run import Run
partition(Run.open(sys.argv[1]))
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) // 1024)
"""


@pytest.mark.chaos
def test_memory_does_not_grow_with_the_rows(tmp_path):
    peaks, how = [], "partition.max_share=0.3"
    for num_rows in (20_000, 100_000):
        truth = rows(num_rows=num_rows, dim=256)  # embeddings of 1 KiB
        run = run_of(str(tmp_path / str(num_rows)), truth, *FOUR, how, "partition.sample_rows=5000", part_rows=4096)
        command = [sys.executable, "-c", PEAK, run.url]
        peaks.append(int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=200).stdout))
        shutil.rmtree(run.url)
    assert peaks[1] - peaks[0] < 60, peaks
