"""Another user of the machine, who makes our folders first, or puts links where we write, gets and changes nothing."""

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ddm_ray.config import load_recipe
from ddm_ray.data.loading.cache import cache_root, local_files
from ddm_ray.data.scratch import scratch_folder
from ddm_ray.errors import StorageError
from ddm_ray.run.graph import ROWS
from ddm_ray.run.manifest import FileRecord, Identity, Manifest
from ddm_ray.run.run import Run
from ddm_ray.store.disk import locked
from ddm_ray.store.store import Store

NOBODY = 65534
NAMES = ("part-0.parquet", "deep/er/part-1.parquet")
SECRET = b"rows of an owner" * 1000

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user at hand"), pytest.mark.contract]


def as_nobody(work: Callable[[], object]) -> bool:
    """Do the work in a process of another user; False if it was refused."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A temporary folder as the system's is: everybody's, each file its owner's; `tmp_path` isn't below it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def rows() -> tuple[Run, Manifest]:
    """Rows in an object store."""
    store = Store("memory:///")
    for name in NAMES:
        store.write(f"{ROWS}/{name}", SECRET + name.encode())
    records = {name: FileRecord.of(SECRET + name.encode()) for name in NAMES}
    return Run(store, load_recipe("tiny")), Manifest(ROWS, Identity({}), records, {})


def modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*")}


def test_nobody_else_reads_a_copy(rows: tuple[Run, Manifest], temporary: Path, tmp_path: Path) -> None:
    for cache in (None, str(tmp_path / "cache")):
        with local_files(*rows, NAMES, cache) as files:
            assert [file.path.read_bytes() for file in files] == [SECRET + name.encode() for name in NAMES]
            root = cache_root(cache)
            folders = {path for path in root.rglob("*") if path.is_dir()} | ({root} if cache is None else set())
            assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
            assert {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()} == {0o600}
            assert as_nobody(lambda: os.listdir("/tmp"))
            assert not any(as_nobody(file.path.read_bytes) for file in files)


def test_copies_of_an_earlier_version_are_closed(rows: tuple[Run, Manifest], temporary: Path, tmp_path: Path) -> None:
    with local_files(*rows, NAMES, str(tmp_path)) as files:
        files[0].path.chmod(0o644)
    cache_root(None).mkdir(mode=0o755)
    for cache in (None, str(tmp_path)):
        with local_files(*rows, NAMES, cache) as files:
            assert stat.S_IMODE(files[0].path.stat().st_mode) == 0o600
            assert cache is not None or stat.S_IMODE(cache_root(None).stat().st_mode) == 0o700


@pytest.mark.parametrize("theirs", ["folder", "open folder", "link"])
def test_a_folder_of_others_is_refused(rows: tuple[Run, Manifest], temporary: Path, theirs: str) -> None:
    root, target = cache_root(None), temporary / "target"
    (os.mkdir if theirs == "link" else Path)(target)

    def make() -> None:
        os.symlink(target, root) if theirs == "link" else os.mkdir(root)
        if theirs == "open folder":
            os.chmod(root, 0o777)

    assert as_nobody(make)
    before = modes(temporary)
    refusal = pytest.raises(StorageError, match=r"choose another folder with `cache`$")
    with refusal as failure, local_files(*rows, NAMES, None):
        pass
    assert "\n" not in str(failure.value)
    assert modes(temporary) == before


def test_links_below_our_folders_lead_nowhere(rows: tuple[Run, Manifest], tmp_path: Path) -> None:
    """In a cache that is everybody's by the user's choice, others put links to a file of ours where we write."""
    cache, precious = tmp_path / "cache", tmp_path / "precious"
    folder = cache / rows[1].digest
    folder.mkdir(parents=True)
    precious.write_bytes(b"precious")
    for name in (NAMES[0], f"{NAMES[0]}.part"):
        (folder / name).symlink_to(precious)
    with local_files(*rows, NAMES, str(cache)) as files:
        assert files[0].path.read_bytes() == SECRET + NAMES[0].encode()
        assert not files[0].path.is_symlink()
    assert precious.read_bytes() == b"precious"
    files[0].path.unlink()
    (folder / f"{NAMES[0]}.lock").unlink()
    (folder / f"{NAMES[0]}.lock").symlink_to(tmp_path / "made")
    (folder / "deep").rename(tmp_path / "elsewhere")
    (folder / "deep").symlink_to(tmp_path / "elsewhere")
    for names in (NAMES[:1], NAMES[1:]):
        with pytest.raises(StorageError, match="link") as failure, local_files(*rows, names, str(cache)):
            pass
        assert "\n" not in str(failure.value)
    assert not (tmp_path / "made").exists()


def test_locks_and_scratch_of_others_are_left_alone(temporary: Path) -> None:
    precious = temporary / "precious"
    precious.mkdir()
    (precious / "file").write_bytes(b"precious")
    with scratch_folder(None) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        other = folder.name[:-4] + "beef"

    def make() -> None:
        os.close(os.open(temporary / f"{other}.lock", os.O_CREAT | os.O_RDWR))
        os.mkdir(temporary / other)
        os.symlink(precious, temporary / "link.lock")

    assert as_nobody(make)
    with scratch_folder(None):
        pass
    with pytest.raises(OSError, match=r"link\.lock"), locked(temporary / "link.lock", 0):
        pass
    assert {path.name for path in temporary.iterdir()} == {"precious", other, f"{other}.lock", "link.lock"}
    assert (precious / "file").exists()


def test_swapping_as_fast_as_can_be_changes_nothing(rows: tuple[Run, Manifest], temporary: Path) -> None:
    """Another user tries to take the place of our folder, and of the copies in it, all the time."""
    root, outside = cache_root(None), temporary / "outside"
    outside.mkdir(mode=0o777)
    os.chmod(outside, 0o777)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        while True:
            for swap in (
                lambda: os.rename(root, temporary / "taken"),
                lambda: os.symlink(outside, root),
                lambda: os.unlink(root),
                lambda: os.symlink(outside, root / rows[1].digest),
            ):
                with suppress(OSError):
                    swap()
    try:
        refused = read = 0
        while read < 5 or refused + read < 50:
            try:
                with local_files(*rows, NAMES, None) as files:
                    for file, name in zip(files, NAMES, strict=True):
                        with file.open() as opened:
                            assert opened.read() == SECRET + name.encode()
                    read += 1
            except StorageError:
                refused += 1
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert os.listdir(outside) == []
    assert not (temporary / "taken").exists()
