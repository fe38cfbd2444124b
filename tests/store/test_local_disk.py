"""A local disk is read by regular files alone, whatever else lies there, and every entry can be listed."""

import errno
import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.config import load_recipe
from ddm_ray.errors import CorruptArtifact, DDMError, StorageError
from ddm_ray.run.manifest import SCHEMA
from ddm_ray.store.checksummed import seal
from ddm_ray.store.store import Store
from tests.store_meter import StoreMeter

HUGE = 6 * 2**30


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.getcwd()
        os.chdir(path.parent)
        bound.bind(path.name)
        os.chdir(here)


ODD: dict[str, tuple[Callable[[Path], None], type[DDMError]]] = {
    "pipe": (os.mkfifo, CorruptArtifact),
    "socket": (bind, CorruptArtifact),
    "device": (lambda path: path.symlink_to("/dev/zero"), CorruptArtifact),
    "loop": (lambda path: path.symlink_to(path.name), StorageError),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_is_refused_at_once(store: Store, tmp_path: Path, kind: str) -> None:
    make, error = ODD[kind]
    make(tmp_path / "x")
    store.write("y", b"1")
    readers = (store.read, lambda key: store.read(key, 4), lambda key: store.read_end(key, 4))
    readers = (*readers, lambda key: store.read_parts(key, [range(4)]))
    for read in (*readers, lambda key: store.fetch(key, tmp_path / "copy")):
        with pytest.raises(error, match=rf"^{tmp_path}/x: [^\n]*$") as refused:
            read("x")
        assert not refused.value.passes
    assert {"x", "y"} <= Store(str(tmp_path.parent)).sizes(tmp_path.name).keys()


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that can't sync folders, as some of networks and in user space."""

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        os_fsync(descriptor)

    os_fsync = os.fsync
    monkeypatch.setattr("os.fsync", fsync)


@pytest.mark.usefixtures("unsynced")
def test_a_disk_that_cannot_sync_folders_is_refused_for_good_and_gets_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Invalid argument") as refused:
        Store(f"{tmp_path}/a/b").create("c/d", b"1")
    assert not refused.value.passes and not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    (tmp_path / "a/other").touch()
    with pytest.raises(StorageError):
        Store(f"{tmp_path}/a").create("c/d", b"1")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "other"]


@pytest.mark.usefixtures("unsynced")
def test_no_run_is_left_where_none_can_be_made(tmp_path: Path) -> None:
    for _ in range(2):
        done = CliRunner().invoke(main, ["init", f"{tmp_path}/new/run", "--recipe", "tiny"])
        assert done.exit_code == 1 and re.search(
            "no run can be made here: .*Invalid argument; choose another folder", done.stderr
        )
        assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("unsynced")
def test_commands_on_a_run_that_was_made_there_do_not_ask_to_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(seal({"schema": SCHEMA, "config": load_recipe("tiny").model_dump(mode="json")}))
    done = CliRunner().invoke(main, ["islands", "drain", str(tmp_path), "north"])
    assert done.exit_code == 1 and "Invalid argument" in done.stderr, done.output


def test_links_are_followed_once_and_never_up(store: Store, tmp_path: Path) -> None:
    store.write("run/a/file", b"12")
    store.write("elsewhere/file", b"123")
    for link, target in {"up": "..", "root": "/", "self": "self", "gone": "nowhere", "out": "../../elsewhere"}.items():
        (tmp_path / "run/a" / link).symlink_to(target)
    (tmp_path / "run/b").symlink_to("a")
    (tmp_path / "run/z").symlink_to("a")
    (tmp_path / "run/linked").symlink_to("a/file")
    assert store.sizes("run") == {
        "a/file": 2,
        "a/out/file": 3,
        "a/self": 0,
        "linked": 2,
        "b/file": 2,
        "b/self": 0,
    }
    assert store.sizes("run/a/root") == store.sizes("run/a/up") == {"": 0}
    assert store.folders("run") == ["a", "b", "z"] and store.read("run/b/file") == store.read("run/linked") == b"12"


def test_names_that_no_object_can_have_are_left_out(store: Store, tmp_path: Path) -> None:
    store.write("run/a", b"1")
    for name in (b"\xff", b"a\x1b[2J", b"a\nb", "a\x9bb".encode(), b"ema.safetensors#12"):
        (tmp_path / "run" / os.fsdecode(name)).write_bytes(b"1")
    (tmp_path / "run" / os.fsdecode(b"folder\xff")).mkdir()
    assert store.sizes("run") == {"a": 1} and store.folders("run") == []


def test_a_file_without_end_is_not_read(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"ab")
    os.truncate(tmp_path / "x", HUGE)
    meter = StoreMeter(monkeypatch)
    assert store.read("x", 2) == b"ab" and store.read_end("x", 2) == bytes(2)
    with pytest.raises(CorruptArtifact, match=f"^{tmp_path}/x: has {HUGE} bytes, and may have 100$"):
        store.read("x", 100, cut=False)
    assert meter.read == 4


@pytest.mark.parametrize("kind", ["disk", "object store"])
def test_parts_of_an_object_are_read_and_no_more(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, data = Store(str(tmp_path) if kind == "disk" else f"memory:///{tmp_path.name}"), bytes(range(200))
    store.write("x", data)
    meter = StoreMeter(monkeypatch)
    assert store.read_parts("x", [range(3, 5), range(190, 200), range(7, 8)]) == [data[3:5], data[190:], data[7:8]]
    assert store.read_parts("x", []) == []
    assert store.read_end("x", 3) == data[-3:] and store.read_end("x", 300) == data
    assert meter.read == 13 + 203
    with pytest.raises(FileNotFoundError):
        store.read_parts("y", [range(1)])


def test_in_an_object_store_it_is_not_read_either(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store("memory:///")
    store.write("x", b"abc")
    assert store.read("x", 2) == b"ab" and store.read("x", 3, cut=False) == b"abc"
    meter = StoreMeter(monkeypatch)
    with pytest.raises(CorruptArtifact, match=r"^memory:/*x: has 3 bytes, and may have 2$"):
        store.read("x", 2, cut=False)
    assert meter.read == 0
