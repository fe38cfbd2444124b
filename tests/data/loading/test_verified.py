"""Files that were verified aren't read again for that, by any process here, until they change."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from ddm_ray.data.loading import verified
from ddm_ray.data.loading.verified import VerifiedFile
from ddm_ray.errors import CorruptArtifact
from ddm_ray.run.manifest import FileRecord

CONTENT = b"rows of a shard"
LONG_AGO = 1_000_000_000


def refuse(record: FileRecord | None) -> CorruptArtifact:
    return CorruptArtifact("differs")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for each time that a file is read whole."""
    every, digest = list[str](), hashlib.file_digest

    def counted(file: object, name: str) -> object:
        every.append(name)
        return digest(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return every


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Verify the file as a process does that begins. Its last change counts as long ago."""
    monkeypatch.setattr(verified, "SETTLED_NS", -1)
    path = tmp_path / "shard"
    path.write_bytes(CONTENT)
    return lambda: VerifiedFile(path, FileRecord.of(CONTENT), refuse).verify_once(tmp_path / "own/notes")


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, reads: list[str], verify: Callable[[], None]) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    verify()
    verify()
    assert len(reads) == 1
    os.utime(tmp_path / "shard", ns=(LONG_AGO, LONG_AGO))
    verify()
    verify()
    assert len(reads) == 2, "what has another time is read again, once"
    (tmp_path / "shard").write_bytes(CONTENT[::-1])
    os.utime(tmp_path / "shard", ns=(LONG_AGO, LONG_AGO))
    for _ in range(2):
        with pytest.raises(CorruptArtifact, match="differs"):
            verify()
    assert len(reads) == 4


def test_a_file_that_was_just_written_is_read_by_each(
    tmp_path: Path, reads: list[str], verify: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another change in the same tick of the disk's clock would not be seen."""
    monkeypatch.undo()
    reads.clear()
    (tmp_path / "own").mkdir(mode=0o700)
    verify()
    assert not [*(tmp_path / "own/notes").iterdir()]


@pytest.mark.parametrize("note", [b"[1, 2", b"[1, 2, 3, 4]", b'["a", 2, 3, 4, 5]', b"0" * 10**6])
def test_a_note_that_is_none_says_nothing(
    tmp_path: Path, reads: list[str], verify: Callable[[], None], note: bytes
) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    verify()
    (path,) = (tmp_path / "own/notes").iterdir()
    path.write_bytes(note)
    verify()
    verify()
    assert len(reads) == 2, "and it is written anew"


@pytest.mark.parametrize("whose", ["another user's", "of another machine"])
def test_nothing_is_noted_of_what_others_have(
    tmp_path: Path, reads: list[str], verify: Callable[[], None], whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    verify()
    (note,) = (tmp_path / "own/notes").iterdir()
    kept = note.read_bytes()
    if whose == "another user's":
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
        monkeypatch.setattr(verified, "own_folder", lambda _: None)
    else:
        monkeypatch.setattr(verified, "LOCAL", {"nfs4"})
    verify()
    assert len(reads) == 2, "a note of such a file isn't taken"
    note.unlink()
    verify()
    assert len(reads) == 3 and not [*note.parent.iterdir()] and kept


def test_without_a_folder_of_its_own_a_process_reads_by_itself(
    tmp_path: Path, reads: list[str], verify: Callable[[], None]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "own").symlink_to(tmp_path / "elsewhere")
    verify()
    verify()
    assert len(reads) == 2 and not [*(tmp_path / "elsewhere").iterdir()]


def test_of_those_that_ask_at_once_one_reads(tmp_path: Path, reads: list[str], verify: Callable[[], None]) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    begin = Barrier(8)

    def ask() -> None:
        begin.wait(60)
        verify()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(ask) for _ in range(8)]:
            done.result()
    assert len(reads) == 1
