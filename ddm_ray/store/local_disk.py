"""Reading a local disk as a store: only regular files are read, and an odd entry doesn't end a listing.

A writer with access to the folder may leave pipes, devices, circular links, and endless files.
"""

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from ddm_ray.errors import CorruptArtifact
from ddm_ray.store.disk import is_unfinished
from ddm_ray.store.refusals import as_storage_error

_OF_ITSELF = (errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM)
"""Error numbers that concern one folder, not the whole disk."""
_TOO_FEW_SLASHES = re.compile(r"(?:file|s3|gs|abfss|hf):/(?!/)|file://(?!/|localhost/)")


def path_of(name: str) -> str | None:
    """The path that a name or a `file:///PATH` stands for; None for another URI. Raises ValueError with the reason."""
    if _TOO_FEW_SLASHES.match(name):
        raise ValueError("has too few slashes for a URI; write file:///PATH, s3://BUCKET/... and so on")
    scheme, _, path = name.partition("://")
    return name if "://" not in name else unquote(path.removeprefix("localhost")) if scheme == "file" else None


def read(path: Path, span: range | Callable[[int], range]) -> bytes:
    """The bytes of a file in a `span`, which may be a function of the file's size. Raises what `chunks` raises."""
    with _refusals(path), _open(path) as file:
        asked = span if isinstance(span, range) else span(os.fstat(file.fileno()).st_size)
        file.seek(asked.start)
        return file.read(len(asked))


def chunks(path: Path, size: int) -> Iterator[bytes]:
    """A file's bytes, `size` at a time. Links are followed.

    Raises FileNotFoundError for an absent file and for a folder, CorruptArtifact for anything else that isn't a
    regular file, and StorageError.
    """
    with _refusals(path):
        file = _open(path)
    with file:
        while True:
            with _refusals(path):
                chunk = file.read(size)
            if not chunk:
                return
            yield chunk


def _open(path: Path) -> BinaryIO:
    # Check before opening, too: to open a device may set it going.
    _require_regular(path, path.stat())
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(opened, "rb")
    _require_regular(path, os.fstat(opened))
    return file


def exists(path: Path) -> bool:
    """True if the path exists and isn't a folder. Raises StorageError."""
    with _refusals(path):
        try:
            return not stat.S_ISDIR(path.stat().st_mode)
        except FileNotFoundError:
            return False


def list_sizes(root: Path) -> dict[str, int]:
    """Sizes in bytes of all entries but folders below `root`, by relative path, sorted. Raises StorageError.

    Links to folders are followed, each folder once. A folder that can't be listed appears as a file; `root` itself
    then has the name "". Unfinished files, and names that no object can have, are left out.
    """
    listed: dict[str, int] = {}
    with _refusals(root):
        above = {_inode(folder) for folder in root.parents if folder.is_dir()}
        own = {_inode(root)} if root.is_dir() else set()
    if own & above:
        return {"": 0}  # a link up
    linked, pending = above | own, [(root, "")]
    for folder, prefix in pending:  # grows meanwhile
        try:
            entries = _entries(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in _OF_ITSELF:
                with as_storage_error(folder):
                    raise
            listed[prefix.rstrip("/")] = 0
            continue
        for entry in entries:
            try:
                if entry.is_dir():
                    if entry.is_symlink():
                        if (inode := _inode(Path(entry.path))) in linked:
                            continue
                        linked.add(inode)
                    pending.append((Path(entry.path), f"{prefix}{entry.name}/"))
                elif not is_unfinished(entry.name):
                    listed[f"{prefix}{entry.name}"] = entry.stat().st_size
            except FileNotFoundError:
                continue  # gone meanwhile, or a link to nothing
            except OSError:
                listed[f"{prefix}{entry.name}"] = 0
    return dict(sorted(listed.items()))


def folders(root: Path) -> list[str]:
    """Sorted names of the folders directly in a folder, links included; empty if it doesn't exist."""
    with _refusals(root):
        try:
            return sorted(entry.name for entry in _entries(root) if os.path.isdir(entry.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno in _OF_ITSELF:
                return []
            raise


def delete_folder(root: Path) -> None:
    """Delete a folder and all below it. Raises StorageError."""
    shutil.rmtree(root, onerror=_unless_concurrent)


def _unless_concurrent(_: object, where: str, info: tuple[type, BaseException, object]) -> None:
    """Ignore entries that are already gone, and folders that another writer fills meanwhile."""
    error = info[1]
    assert isinstance(error, OSError)
    if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY):
        with as_storage_error(where):
            raise error


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Entries of a folder, by name, but for names that no object can have."""
    with os.scandir(folder) as entries:
        return sorted((entry for entry in entries if _is_name(entry.name)), key=lambda entry: entry.name)


def _is_name(name: str) -> bool:
    """True unless a name has control letters, or bytes that aren't text."""
    return not any(letter < " " or "\x7f" <= letter < "\xa0" or "\ud800" <= letter < "\ue000" for letter in name)


def _inode(folder: Path) -> tuple[int, int]:
    known = folder.stat()
    return known.st_dev, known.st_ino


def _require_regular(path: Path, known: os.stat_result) -> None:
    if stat.S_ISDIR(known.st_mode):
        raise FileNotFoundError(errno.ENOENT, "is a folder", str(path))
    if not stat.S_ISREG(known.st_mode):
        raise CorruptArtifact(f"{path}: isn't a regular file (a pipe, socket or device); delete it")


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Raise StorageError for what the disk refuses, but for FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError:
        with as_storage_error(path):
            raise
