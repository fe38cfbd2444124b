"""Atomic files on a local disk, and locks.

Readers see a file complete or not at all. Once it has its name, it survives a power cut.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from ddm_ray.errors import StorageError

UNFINISHED = "new#"
"""Prefix of the name of an incomplete file; digits follow. obstore neither lists nor reads such names."""
MAX_TRIES = 3
"""Attempts to make a file's folders, which other processes may delete meanwhile."""


def put(path: Path, chunks: Iterable[bytes | memoryview], replace: bool = True) -> bool:
    """Write a file; return False if it exists and `replace` is false. If `chunks` raises, no file is left.

    The content is synced to the disk before the file gets its name; then the entries of its folders are. Raises
    OSError. A new file that the disk refuses leaves nothing, not even folders that were made for it.
    """
    descriptor, unfinished, folders = _begin(path.parent)
    left = [unfinished]
    try:
        with open(descriptor, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(descriptor)
        if replace:
            os.replace(unfinished, path)
        else:
            os.link(unfinished, path)
            left.append(path)
            unfinished.unlink(missing_ok=True)
        for folder in (path.parent, *folders):
            _sync(folder)
    except FileExistsError:
        unfinished.unlink(missing_ok=True)
        return False
    except BaseException:
        for each in left:
            with suppress(OSError):
                each.unlink()
        _remove_empty(path.parent, folders)
        raise
    return True


def read_back(path: Path) -> str:
    """The SHA-256 of a file, in hex, read from the disk and not from the page cache. Raises OSError."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_unfinished(name: str) -> bool:
    """True if this is the name of a file that `put` has not finished. Leftovers of obstore count, too."""
    _, mark, digits = name.partition("#")
    return bool(mark) and digits.isascii() and digits.isdigit()


def unfinished_below(root: Path, seconds: float) -> list[tuple[Path, int]]:
    """Paths and sizes of unfinished files below a folder that were last written at least so many seconds ago."""
    left = list[tuple[Path, int]]()
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in sorted(names) if is_unfinished(name)):
            with suppress(FileNotFoundError):
                state = path.lstat()
                if time.time() - state.st_mtime >= seconds:
                    left.append((path, state.st_size))
    return left


def require_key(key: str, where: str) -> None:
    """Raise StorageError, which begins with `where`, for a key that leaves the store or that no listing shows."""
    parts = key.split("/")
    odd = not {"", ".", ".."}.isdisjoint(parts) or any(ord(letter) < 32 or ord(letter) == 127 for letter in key)
    if odd or is_unfinished(parts[-1]):
        raise StorageError(f"{where}: {key!r:.200} is no key", passes=False)


@contextmanager
def locked(path: Path, kind: int) -> Iterator[int]:
    """Hold a lock on a file; it ends with the process. `kind`: flags of flock.

    Yields the descriptor. Raises BlockingIOError if another process holds the lock and `kind` has LOCK_NB. Raises
    OSError for other failures and for a symbolic link.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            # The previous holder may have removed the file. A newcomer would then create and lock another one.
            if os.fstat(descriptor).st_ino == inode(path):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def inode(path: Path) -> int | None:
    """The number of the file, or of the link, that a path names; None if it names none."""
    try:
        return path.lstat().st_ino
    except FileNotFoundError:
        return None


def _begin(folder: Path) -> tuple[int, Path, list[Path]]:
    """Create an unfinished file, and its folders. Return its descriptor, its path and the folders with new entries."""
    unfinished, folders = folder / f"{UNFINISHED}{uuid4().int}", list[Path]()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(MAX_TRIES):
        try:
            return os.open(unfinished, flags, 0o666), unfinished, folders
        except FileNotFoundError:
            folders += _make(folder)
        except OSError:
            _remove_empty(folder, folders)
            raise
    raise FileNotFoundError(f"{folder}: is deleted again and again")


def _make(folder: Path) -> list[Path]:
    """Make a folder and those above it. Return the folders with new entries, those that other processes made too."""
    above = list[Path]()
    try:
        folder.mkdir()
    except FileNotFoundError:
        above = _make(folder.parent)
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        pass
    return [folder.parent, *above]


def _remove_empty(folder: Path, with_new: list[Path]) -> None:
    """Remove an empty folder and those above it, if they are among the new entries of the folders `with_new`."""
    with suppress(OSError):  # it isn't empty: another process has written there
        while folder.parent in with_new:
            folder.rmdir()
            folder = folder.parent


def _sync(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # another writer deleted it meanwhile
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
