"""Copies of shards in an object store: made once, verified, shared, and removed if they were temporary."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ddm_ray.data.loading import shard_files
from ddm_ray.data.loading.loader import Loader
from ddm_ray.data.loading.shard_files import files_of, num_rows
from ddm_ray.data.schema import TRAIN
from ddm_ray.errors import CorruptArtifact, StorageError
from ddm_ray.run.graph import shard
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from tests.data.s3 import s3_server, upload
from tests.random_run import make_data

pytestmark = pytest.mark.contract

SHARDS = [shard(0), shard(1)]
PLACES = torch.arange(50)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_data(str(tmp_path_factory.mktemp("cache") / "run"), num_files=3, row_group_rows=16)


@pytest.fixture
def remote(local: Run) -> Run:
    """The same run in an object store of this process's memory."""
    store = Store("memory:///")
    for key in local.store.sizes("partition"):
        store.write(f"partition/{key}", local.store.read(f"partition/{key}"))
    for key in local.store.sizes("rows"):
        store.write(f"rows/{key}", local.store.read(f"rows/{key}"))
    return Run(store, local.config)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder, for this test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def rows_of(loader: Loader) -> torch.Tensor:
    return torch.cat([loader.batch(step, PLACES)[0] for step in range(3)])


def parquet_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


@pytest.mark.parametrize("rows_gib", [0, 1])
def test_rows_of_an_object_store_are_those_of_the_folder(
    local: Run, remote: Run, temporary: Path, rows_gib: int
) -> None:
    with Loader(local, SHARDS, 0, 50) as local_loader, Loader(remote, SHARDS, 0, 50, rows_gib) as remote_loader:
        assert len(parquet_files(temporary)) == 6
        assert torch.equal(rows_of(local_loader), rows_of(remote_loader))
    assert [path for path in temporary.rglob("*") if path.is_file()] == []


def test_a_cache_stays_and_is_used_again(local: Run, remote: Run, tmp_path: Path) -> None:
    cache = tmp_path / "a" / "cache"
    with Loader(remote, SHARDS, 0, 50, cache=str(cache)) as loader:
        expected = rows_of(loader)
    copies = parquet_files(cache)
    folders = {path.parent.name for path in copies}
    assert folders == {local.require(artifact).digest for artifact in SHARDS} and len(copies) == 6
    for path in copies:
        remote.store.delete_one(f"{shard(0)}/{path.name}")
    with Loader(remote, SHARDS, 0, 50, cache=str(cache)) as loader:
        assert torch.equal(rows_of(loader), expected)


@pytest.mark.parametrize("footer_bytes", [16, 2**16])
def test_the_number_of_a_files_rows_is_read_from_its_footer(
    local: Run, remote: Run, temporary: Path, footer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that is longer than what is read first."""
    monkeypatch.setattr(shard_files, "FOOTER_BYTES", footer_bytes)
    for artifact in SHARDS:
        manifest = local.require(artifact)
        for run in (local, remote):
            files = files_of(manifest, TRAIN)
            assert sum(num_rows(run, f"{artifact}/{name}") for name in files) == manifest.info["rows_train"]
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:99] + b"?" + data[100:]])
def test_a_damaged_copy_is_fetched_again_and_a_damaged_object_refused(remote: Run, tmp_path: Path, damage) -> None:
    with Loader(remote, SHARDS, 0, 50, cache=str(tmp_path)) as loader:
        expected = rows_of(loader)
    copy = parquet_files(tmp_path)[0]
    copy.write_bytes(damage(copy.read_bytes()))
    with Loader(remote, SHARDS, 0, 50, cache=str(tmp_path)) as loader:
        assert torch.equal(rows_of(loader), expected)
    (artifact,) = (name for name in SHARDS if remote.require(name).digest == copy.parent.name)
    remote.store.write(f"{artifact}/{copy.name}", damage(copy.read_bytes()))
    copy.unlink()
    with pytest.raises(CorruptArtifact, match=f"{artifact}/{copy.name}: .*its manifest.*; mend"):
        Loader(remote, SHARDS, 0, 50, cache=str(tmp_path))
    assert not copy.exists()
    remote.store.delete_one(f"{artifact}/{copy.name}")
    with pytest.raises(CorruptArtifact, match=f"{artifact}/{copy.name}: gone"):
        Loader(remote, SHARDS, 0, 50, cache=str(tmp_path))


def test_many_at_once_share_a_temporary_copy_until_the_last_is_done(remote: Run, temporary: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        loaders = list(pool.map(lambda _: Loader(remote, SHARDS, 0, 50, rows_gib=0), range(6)))
    assert len(parquet_files(temporary)) == 6
    assert not list(temporary.rglob("*.part"))
    inodes = {path.stat().st_ino for path in parquet_files(temporary)}
    for loader in loaders[1:]:
        loader.close()
    assert {path.stat().st_ino for path in parquet_files(temporary)} == inodes
    with Loader(remote, SHARDS, 0, 50, rows_gib=0) as late:
        assert torch.equal(rows_of(late), rows_of(loaders[0]))
    loaders[0].close()
    assert parquet_files(temporary) == []


def test_a_cache_that_cannot_be_written_is_said_in_one_line(remote: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match=r"file/.*choose another folder") as failure:
        Loader(remote, SHARDS, 0, 50, cache=str(tmp_path / "file"))
    assert "\n" not in str(failure.value)


def test_fetching_streams_an_object_into_a_file(tmp_path: Path) -> None:
    with s3_server(tmp_path / "log"):
        (tmp_path / "folder").mkdir()
        data = bytes(range(256)) * 60_000  # more than one chunk
        (tmp_path / "folder" / "object").write_bytes(data)
        store = Store(upload(tmp_path / "folder", "folder"))
        assert store.fetch("object", tmp_path / "copy") == Store(str(tmp_path)).fetch("copy", tmp_path / "again")
        assert (tmp_path / "copy").read_bytes() == (tmp_path / "again").read_bytes() == data
        with pytest.raises(FileNotFoundError):
            store.fetch("other", tmp_path / "none")
