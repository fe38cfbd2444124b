"""Files on a local disk that readers see complete or not at all, and that outlive a power cut once named; and locks."""

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
"""Beginning of the name, digits follow, of a file that isn't complete. obstore lists and reads no such names."""
MOST_TRIES = 3
"""Times that folders are made for a file, while others delete them."""


def put(path: Path, chunks: Iterable[bytes | memoryview], replace: bool = True) -> bool:
    """Write a file; False if there is one already and `replace` is false. What `chunks` raises leaves nothing.

    All of it is on the disk before it has its name, and then the name, with those of the folders that were made for it.
    Raises OSError.
    """
    descriptor, unfinished, folders = _begin(path.parent)
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
    except FileExistsError:
        unfinished.unlink(missing_ok=True)
        return False
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    if not replace:
        unfinished.unlink(missing_ok=True)
    for folder in (path.parent, *folders):
        _sync(folder)
    return True


def read_back(path: Path) -> str:
    """The SHA-256 of a file, in hex, read from the disk: what memory keeps of it is dropped first. Raises OSError."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_unfinished(name: str) -> bool:
    """True if a file of this name is one that `put` began; obstore's own leftovers count, too."""
    _, mark, digits = name.partition("#")
    return bool(mark) and digits.isascii() and digits.isdigit()


def unfinished_below(root: Path, seconds: float) -> list[tuple[Path, int]]:
    """Paths and bytes of files below a folder that never got their names, and weren't written for so many seconds."""
    left = list[tuple[Path, int]]()
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in sorted(names) if is_unfinished(name)):
            with suppress(FileNotFoundError):
                state = path.lstat()
                if time.time() - state.st_mtime >= seconds:
                    left.append((path, state.st_size))
    return left


def require_key(key: str, where: str) -> None:
    """Raise StorageError, which begins with `where`, for a key whose file would be elsewhere, or in no listing."""
    parts = key.split("/")
    odd = not {"", ".", ".."}.isdisjoint(parts) or any(ord(letter) < 32 or ord(letter) == 127 for letter in key)
    if odd or is_unfinished(parts[-1]):
        raise StorageError(f"{where}: {key!r:.200} is no key", passes=False)


@contextmanager
def locked(path: Path, kind: int) -> Iterator[int]:
    """Hold a lock file, which is the process's own to lose: a kill frees it. `kind`: flags of flock.

    Yields its descriptor. Raises BlockingIOError if another holds it and `kind` has LOCK_NB, OSError, also for a link.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            # Whoever held it before may have removed it: then a newcomer would make and lock another one.
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
    """A new file, open, and its path, in a folder that is made with all above it; the folders with new entries."""
    unfinished, folders = folder / f"{UNFINISHED}{uuid4().int}", list[Path]()
    for _ in range(MOST_TRIES):
        with suppress(FileNotFoundError):
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            return descriptor, unfinished, folders
        folders += _make(folder)
    raise FileNotFoundError(f"{folder}: is deleted again and again")


def _make(folder: Path) -> list[Path]:
    """Make a folder that was absent, and those above it; the folders with new entries, also by others meanwhile."""
    above = list[Path]()
    try:
        folder.mkdir()
    except FileNotFoundError:
        above = _make(folder.parent)
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        pass
    return [folder.parent, *above]


def _sync(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # another writer deleted it meanwhile
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
