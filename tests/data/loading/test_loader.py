"""Rows come back from shards: all at once for evaluation, and batch by batch, in memory or streamed."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from ddm_ray.config import load_recipe
from ddm_ray.core.condition import Text
from ddm_ray.data.loading.loader import Loader, load_rows
from ddm_ray.data.schema import column, shard_schema
from ddm_ray.errors import CorruptArtifact, DataError, DriftError, MissingArtifact
from ddm_ray.run.graph import PARTITION, shard
from ddm_ray.run.run import Run
from tests.random_run import make_data, make_texts, write_partition

pytestmark = pytest.mark.contract

SHARDS = [shard(0), shard(1)]
SMALL = 3000  # bytes: about two row groups of 16 rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """400 digits in two shards of three files a split and row groups of 16."""
    return make_data(str(tmp_path_factory.mktemp("loader") / "run"), num_files=3, row_group_rows=16)


@pytest.fixture(scope="module")
def texts_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_texts(str(tmp_path_factory.mktemp("texts") / "run"))


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def same(one, other) -> bool:
    """Whether two batches are equal, to the bit."""
    (data, condition, cluster), (data_2, condition_2, cluster_2) = one, other
    if isinstance(condition, Text):
        names = ("tokens_BLE", "mask_BL", "pooled_BP")
        alike = all(torch.equal(getattr(condition, name), getattr(condition_2, name)) for name in names)
    else:
        alike = torch.equal(condition, condition_2)
    return alike and torch.equal(data, data_2) and torch.equal(cluster, cluster_2)


def test_rows_come_back_from_their_shards(run: Run) -> None:
    pixels, labels = load_digits(return_X_y=True)
    splits = [load_rows(run, SHARDS, split) for split in ("train", "heldout")]
    assert sorted(splits[0].ids + splits[1].ids) == [f"digits/{index:04d}" for index in range(400)]
    for rows in splits:
        index = [int(row_id.removeprefix("digits/")) for row_id in rows.ids]
        assert index == sorted(index)
        assert rows.data_NCHW.dtype == torch.float32
        assert rows.data_NCHW.shape == (len(rows), 1, 8, 8)
        assert np.abs((rows.data_NCHW.numpy().reshape(-1, 64) + 1) * 8 - pixels[index]).max() < 0.04
        assert (rows.label_N.numpy() == labels[index]).all()


def test_one_shard_is_one_cluster_and_shards_come_in_any_order(run: Run) -> None:
    for cluster in (0, 1):
        rows = load_rows(run, [shard(cluster)])
        assert (rows.cluster_N == cluster).all()
        assert len(rows) == run.require(shard(cluster)).info["rows_train"]
    forwards, backwards = load_rows(run, SHARDS), load_rows(run, SHARDS[::-1])
    assert forwards.ids == backwards.ids
    assert torch.equal(forwards.data_NCHW, backwards.data_NCHW)
    assert torch.equal(forwards.cluster_N, backwards.cluster_N)
    with Loader(run, SHARDS, 0, 32) as one, Loader(run, SHARDS[::-1], 0, 32) as other:
        assert same(one.batch(3, torch.arange(32)), other.batch(3, torch.arange(32)))


def test_texts_come_back_with_their_rows(texts_run: Run) -> None:
    rows = load_rows(texts_run, SHARDS)
    assert rows.text is not None and rows.condition is rows.text and not rows.label_N.any()
    bare = load_rows(texts_run, SHARDS, with_texts=False)
    assert (bare.ids, bare.text) == (rows.ids, None) and torch.equal(bare.data_NCHW, rows.data_NCHW)
    assert torch.equal(bare.condition, torch.zeros(len(rows), dtype=torch.int64))
    number_N = torch.tensor([int(row_id.removeprefix("texts/")) for row_id in rows.ids])
    assert number_N.tolist() == list(range(10, 100))
    assert torch.equal(rows.text.mask_BL.sum(1), number_N % 5 + 1)
    assert torch.equal(rows.cluster_N, number_N % 2)
    assert ((rows.data_NCHW.mean((1, 2, 3)) > 0) == (rows.cluster_N == 1)).all()
    assert rows.text.pooled_BP is not None and rows.text.pooled_BP.shape == (90, 3)


@pytest.mark.parametrize("texts", [False, True])
def test_an_epoch_is_all_training_rows_once(run: Run, texts_run: Run, texts: bool) -> None:
    """Each with its own condition and cluster."""
    of = texts_run if texts else run
    rows = load_rows(of, SHARDS)
    with Loader(of, SHARDS, 5, len(rows), rows_gib=0, window_bytes=SMALL) as loader:
        assert loader.num_rows == len(rows)
        epochs = [loader.batch(epoch, torch.arange(len(rows))) for epoch in range(2)]
    assert not torch.equal(epochs[0][0], epochs[1][0])
    number_of = {data.numpy().tobytes(): number for number, data in enumerate(rows.data_NCHW)}
    assert len(number_of) == len(rows)
    for data_BCHW, condition, cluster_B in epochs:
        number_B = torch.tensor([number_of[data.numpy().tobytes()] for data in data_BCHW])
        assert sorted(number_B.tolist()) == list(range(len(rows)))
        assert torch.equal(cluster_B, rows.cluster_N[number_B])
        expected = rows.label_N[number_B] if rows.text is None else rows.text[number_B]
        assert same((data_BCHW, condition, cluster_B), (rows.data_NCHW[number_B], expected, cluster_B))


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize("batch", [7, 64, 500])
def test_streamed_is_in_memory_to_the_bit(run: Run, texts_run: Run, texts: bool, batch: int) -> None:
    """Over windows and epochs, also where a batch spans several."""
    of = texts_run if texts else run
    with (
        Loader(of, SHARDS, 1, batch, rows_gib=1, window_bytes=SMALL) as held,
        Loader(of, SHARDS, 1, batch, rows_gib=0, window_bytes=SMALL) as streamed,
    ):
        assert held.in_memory and not streamed.in_memory
        for step in range(800 // batch):
            assert same(held.batch(step, torch.arange(batch)), streamed.batch(step, torch.arange(batch)))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 5), st.sampled_from([0.0, 1.0]))
def test_a_restart_at_any_step_goes_on_with_the_same_rows(run, step, batch, before, rows_gib):
    def loader() -> Loader:
        return Loader(run, SHARDS, 2, batch, rows_gib=rows_gib, window_bytes=SMALL)

    with loader() as undisturbed, loader() as restarted:
        for earlier in range(max(0, step - before), step):
            undisturbed.batch(earlier, torch.arange(batch))
        full_batch = undisturbed.batch(step, torch.arange(batch))
        assert same(full_batch, restarted.batch(step, torch.arange(batch)))
        # A rank's share is filled up with rows from the beginning of the batch.
        place_B = torch.arange(batch // 2, batch // 2 + batch) % batch
        part = tuple(tensor[place_B] for tensor in full_batch)
        assert same(part, restarted.batch(step, place_B))


def test_rows_are_held_if_they_fit(run: Run) -> None:
    stored = sum(
        record.bytes
        for artifact in SHARDS
        for name, record in run.require(artifact).files.items()
        if name.startswith("train-")
    )
    for limit, held in ((stored, True), (stored - 1, False)):
        with Loader(run, SHARDS, 0, 4, rows_gib=limit / 2**30) as loader:
            assert loader.in_memory is held
    for ranks_here, held in ((1, True), (10**9, False)):
        with Loader(run, SHARDS, 0, 4, ranks_here=ranks_here) as loader:
            assert loader.in_memory is held, "a quarter of what is free, shared"


def test_closing_ends_the_thread(run: Run) -> None:
    before = threading.active_count()
    with Loader(run, SHARDS, 0, 4, rows_gib=0, window_bytes=SMALL) as loader:
        loader.batch(0, torch.arange(4))
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_missing_or_damaged_shard_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(MissingArtifact, match=r"no finished partition/shards/cluster=000 yet; first make rows$"):
        load_rows(Run.create(str(tmp_path / "empty"), run.config), [shard(0)])
    shutil.copytree(run.url, tmp_path / "run")
    copied = Run.open(str(tmp_path / "run"))
    flip_byte(tmp_path / "run" / shard(1) / "train-00001.parquet")
    load_rows(copied, [shard(0)])
    Loader(copied, [shard(0)], 0, 4).close()
    for read in (lambda: load_rows(copied, SHARDS), lambda: Loader(copied, SHARDS, 0, 4)):
        with pytest.raises(CorruptArtifact, match=r"cluster=001/train-00001\.parquet: .*checksum.*; mend"):
            read()
    (tmp_path / "run" / shard(1) / "train-00001.parquet").unlink()
    with pytest.raises(CorruptArtifact, match=r"cluster=001/train-00001\.parquet: gone"):
        Loader(copied, SHARDS, 0, 4)


@pytest.mark.parametrize("rows_gib", [0, 1])
def test_a_file_that_is_cut_while_it_is_read_is_named(run: Run, tmp_path: Path, rows_gib: int) -> None:
    shutil.copytree(run.url, tmp_path / "run")
    copied = Run.open(str(tmp_path / "run"))
    with Loader(copied, [shard(0)], 0, 400, rows_gib=rows_gib, window_bytes=SMALL) as loader:
        path = tmp_path / "run" / shard(0) / "train-00002.parquet"
        path.write_bytes(path.read_bytes()[:-1000])
        if rows_gib:
            loader.batch(0, torch.arange(400))
        else:
            with pytest.raises(CorruptArtifact, match=r"train-00002\.parquet: \d+ bytes, its manifest says"):
                loader.batch(0, torch.arange(400))


def swap(path: Path) -> None:
    """Another file of rows, as good as the one that was verified, takes its name."""
    other = path.with_name("train-00001.parquet")
    shutil.copy(other, path.with_name("other"))
    path.with_name("other").rename(path)


def flip_unseen(path: Path) -> None:
    before = path.stat()
    flip_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [swap, flip_unseen])
def test_a_file_that_is_another_than_the_one_verified_is_not_read(run: Run, tmp_path: Path, change) -> None:
    shutil.copytree(run.url, tmp_path / "run")
    copied = Run.open(str(tmp_path / "run"))
    with Loader(copied, [shard(0)], 0, 400, rows_gib=0, window_bytes=SMALL) as loader:
        change(tmp_path / "run" / shard(0) / "train-00002.parquet")
        with pytest.raises(CorruptArtifact, match=r"train-00002\.parquet: .* its manifest"):
            loader.batch(0, torch.arange(400))


def test_a_copy_or_another_link_of_a_file_is_the_same(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.url, tmp_path / "run")
    copied = Run.open(str(tmp_path / "run"))
    with Loader(copied, [shard(0)], 0, 400, rows_gib=0, window_bytes=SMALL) as loader:
        before = loader.batch(0, torch.arange(400))
        path = tmp_path / "run" / shard(0) / "train-00002.parquet"
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").rename(path)
        os.link(path.with_name("train-00001.parquet"), tmp_path / "link")
        assert same(before, loader.batch(0, torch.arange(400)))


def test_a_shard_of_another_partition_is_never_read(run: Run, tmp_path: Path) -> None:
    """Its manifest is whole and its rows are the run's; only the partition tells."""
    shutil.copytree(run.url, tmp_path / "run")
    copied = Run.open(str(tmp_path / "run"))
    other = make_data(str(tmp_path / "other"), num_files=2, row_group_rows=16)
    assert other.identity(shard(0)) == copied.identity(shard(0))
    shutil.rmtree(tmp_path / "run" / shard(0))
    shutil.copytree(Path(other.url) / shard(0), tmp_path / "run" / shard(0))
    for read in (load_rows, lambda *what: Loader(*what, 0, 4)):
        with pytest.raises(DriftError, match="cluster=000 isn't the shard that partition lists; delete"):
            read(copied, [shard(0)])
    copied.store.delete_one(f"{PARTITION}/_MANIFEST.json")
    assert len(load_rows(copied, [shard(0)])) > 0, "a site that has one shard alone"


def test_a_shard_without_training_rows_is_said_to_be_empty(tmp_path: Path) -> None:
    run = make_data(str(tmp_path / "run"), num_rows=1)
    empty = [artifact for artifact in SHARDS if not run.require(artifact).info["rows_train"]]
    with pytest.raises(DataError, match=f"{empty[0]} have no training row"):
        Loader(run, empty, 0, 4)


MEASURED = """
import re, sys
from pathlib import Path
import torch
from ddm_ray.data.loading.loader import Loader
from ddm_ray.run.graph import shard
from ddm_ray.run.run import Run

# Not getrusage's: that is also of the process this one was forked from.
peak = lambda: int(re.search("VmHWM: *([0-9]+)", Path("/proc/self/status").read_text().replace(chr(9), " "))[1]) // 1024
run = Run.open(sys.argv[1])
with Loader(run, [shard(0)], 0, 64, rows_gib=0, window_bytes=2**20) as loader:
    loader.batch(0, torch.arange(64))
before = peak()
with Loader(run, [shard(0)], 0, 64, rows_gib=0, window_bytes=8 * 2**20) as loader:
    for step in range(loader.num_rows // 64):
        loader.batch(step, torch.arange(64))
print(peak() - before)
"""


@pytest.mark.chaos
def test_streaming_takes_the_memory_of_a_few_windows(tmp_path: Path) -> None:
    """Windows of 8 MiB of a shard of 80 MiB."""
    num_rows = 20_000
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", ("data.image_size=64",)))
    columns = {
        "id": [str(number) for number in range(num_rows)],
        "data": column(np.random.default_rng(0).integers(256, size=(num_rows, 4096), dtype=np.uint8), np.dtype("u1")),
        "label": np.zeros(num_rows, int),
    }
    table = pa.table(columns, schema=shard_schema(run.config.data)).append_column(
        "split", pa.array(["train"] * num_rows)
    )
    write_partition(run, table, np.zeros(num_rows, int), row_group_rows=1024)
    command = [sys.executable, "-c", MEASURED, run.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    print(done.stdout)
    assert int(done.stdout) < 5 * 8, "MiB beside those of two small windows"
