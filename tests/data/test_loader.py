import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from ddm_ray.data.loader import load_rows, row_order
from ddm_ray.data.partition import partition
from ddm_ray.errors import CorruptArtifact, MissingArtifact
from ddm_ray.storage.run import Run, shard
from tests.data.rows import commit_rows, flip_byte

seeds = st.integers(0, 2**40)
sizes = st.integers(1, 40)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    run = commit_rows(str(tmp_path_factory.mktemp("loader") / "run"))
    partition(run)
    return run


def test_rows_come_back_from_their_shards(run):
    pixels, labels = load_digits(return_X_y=True)
    splits = [load_rows(run, [shard(0), shard(1)], split) for split in ("train", "heldout")]
    assert sorted(splits[0].ids + splits[1].ids) == [f"digits/{index:04d}" for index in range(1797)]
    for rows in splits:
        index = [int(row_id.removeprefix("digits/")) for row_id in rows.ids]
        assert index == sorted(index)
        assert rows.data_NCHW.dtype == torch.float32
        assert rows.data_NCHW.shape == (len(rows), 1, 8, 8)
        assert np.abs((rows.data_NCHW.numpy().reshape(-1, 64) + 1) * 8 - pixels[index]).max() < 0.04
        assert (rows.label_N.numpy() == labels[index]).all()


def test_one_shard_is_one_cluster_and_shards_come_in_any_order(run):
    for cluster in (0, 1):
        rows = load_rows(run, [shard(cluster)])
        assert (rows.cluster_N == cluster).all()
        assert len(rows) == run.require(shard(cluster)).info["rows_train"]
    there, back = load_rows(run, [shard(0), shard(1)]), load_rows(run, [shard(1), shard(0)])
    assert there.ids == back.ids
    assert torch.equal(there.data_NCHW, back.data_NCHW)
    assert torch.equal(there.cluster_N, back.cluster_N)


def test_a_damaged_or_missing_shard_is_refused(tmp_path):
    run = commit_rows(str(tmp_path / "run"))
    with pytest.raises(MissingArtifact, match="ddm partition"):
        load_rows(run, [shard(0)])
    partition(run)
    flip_byte(run, f"{shard(1)}/part-0.parquet")
    load_rows(run, [shard(0)])
    with pytest.raises(CorruptArtifact, match=r"cluster=001/part-0.parquet"):
        load_rows(run, [shard(0), shard(1)])


@settings(deadline=None)
@given(seeds, sizes, sizes, st.integers(1, 4))
def test_every_epoch_has_every_row_once(seed, num_rows, batch, num_epochs):
    steps = -(-num_rows * num_epochs // batch)
    stream = torch.cat([row_order(seed, num_rows, step, batch) for step in range(steps)])
    for epoch in range(num_epochs):
        rows = stream[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(rows.tolist()) == list(range(num_rows))


@settings(deadline=None)
@given(seeds, sizes, sizes, sizes, st.integers(0, 10**9))
def test_a_batch_is_a_slice_of_one_stream(seed, num_rows, batch, other, step):
    pieces = torch.cat([row_order(seed, num_rows, step * other + part, batch) for part in range(other)])
    assert torch.equal(pieces, row_order(seed, num_rows, step, batch * other))


def test_orders_differ_by_seed_and_epoch_and_are_not_shared():
    orders = [row_order(seed, 100, epoch, 100) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.tolist()) for order in orders}) == 4
    first = orders[0].clone()
    orders[0].zero_()
    assert torch.equal(row_order(0, 100, 0, 100), first)


def test_positions_are_uniform():
    firsts = torch.stack([row_order(seed, 10, 0, 1) for seed in range(2000)]).flatten()
    counts = torch.bincount(firsts, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-squared of 9 degrees of freedom, p = .001
