"""An evaluation reads the files in which its real rows lie, and no others: the first of each shard."""

from collections import Counter
from pathlib import Path

import pytest

from ddm_ray.data.loading.loader import load_rows
from ddm_ray.data.order import shuffle_keys
from ddm_ray.errors import CorruptArtifact
from ddm_ray.evaluate import real_rows
from ddm_ray.evaluate.real_rows import RealRows
from ddm_ray.run.graph import shard
from ddm_ray.store.store import Store
from tests.data.rows import flip_byte
from tests.evaluate.test_reference import SETTINGS, made
from tests.random_run import make_data, make_run

pytestmark = pytest.mark.contract

SHARDS = [shard(0), shard(1)]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes were read of each object."""
    sizes, read_begin, read_end = Counter[str](), Store.read, Store.read_end

    def reads(store: Store, key: str, most: int | None = None, cut: bool = True) -> bytes:
        data = read_begin(store, key, most, cut)
        sizes[key] += len(data)
        return data

    def reads_end(store: Store, key: str, size: int) -> bytes:
        data = read_end(store, key, size)
        sizes[key] += len(data)
        return data

    monkeypatch.setattr(Store, "read", reads)
    monkeypatch.setattr(Store, "read_end", reads_end)
    return sizes


def of_rows(read: Counter[str]) -> set[str]:
    return {key for key in read if key.rpartition("/")[2].startswith("train-")}


@pytest.mark.parametrize("most", [2, 7, 60, 150, 359])
def test_they_are_the_first_of_each_shard(tmp_path: Path, most: int, read: Counter[str]) -> None:
    run = make_data(str(tmp_path / "run"), num_files=6, row_group_rows=16)
    every = [load_rows(run, [artifact]) for artifact in SHARDS]
    read.clear()
    rows = load_rows(run, SHARDS, most=most)
    total, expected = sum(map(len, every)), set[str]()
    for before, own in zip((0, len(every[0])), every, strict=True):
        count = most * (before + len(own)) // total - most * before // total
        expected |= set(sorted(own.ids, key=lambda row_id: shuffle_keys([row_id])[0])[:count])
    assert rows.ids == sorted(expected) and len(rows) == most
    files = [[name for name in run.require(artifact).files if name.startswith("train-")] for artifact in SHARDS]
    assert len(of_rows(read)) <= sum(-(-most * len(own) // total) for own in files) + len(SHARDS)
    if most == 359:
        assert len(of_rows(read)) == sum(map(len, files))


@pytest.mark.chaos
def test_what_is_read_does_not_grow_with_the_rows(
    tmp_path: Path, read: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight times as many in eight times as many files."""
    monkeypatch.setattr(real_rows, "KEPT_BYTES", 30 * 4 * 64)
    settings, sizes = (*SETTINGS, "evaluate.real_rows=30"), []
    for files in (2, 16):
        run = make_run(str(tmp_path / str(files)), settings=settings, num_rows=100 * files, num_files=files)
        read.clear()
        rows = RealRows.of(run)
        assert len(rows.train) == 30
        _, real = made(run, rows.train)
        assert real.rows == 30
        assert of_rows(read) == {f"{artifact}/train-00000.parquet" for artifact in SHARDS}
        sizes.append(sum(read[key] for key in of_rows(read)))
    assert sizes[1] < 1.5 * sizes[0]


def test_a_file_that_was_altered_is_refused_if_it_is_read(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), settings=(*SETTINGS, "evaluate.real_rows=30"), num_files=4)
    flip_byte(run, f"{shard(1)}/train-00003.parquet")
    rows = load_rows(run, SHARDS, most=30)
    made(run, rows)
    flip_byte(run, f"{shard(1)}/train-00000.parquet")
    with pytest.raises(CorruptArtifact, match=r"cluster=001/train-00000.parquet: checksum differs"):
        load_rows(run, SHARDS, most=30)


def test_rows_that_a_manifest_only_promises_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_data(str(tmp_path / "run"), num_files=2)
    monkeypatch.setattr("ddm_ray.data.loading.shard_files.files_of", lambda manifest, split: [f"{split}-00000.parquet"])
    with pytest.raises(CorruptArtifact, match="hasn't the rows that its manifest says"):
        load_rows(run, SHARDS, most=300)
