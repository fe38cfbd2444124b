"""A file on a local disk that holds what its manifest says, from when it is verified to the last time it is read."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from ddm_ray.errors import CorruptArtifact
from ddm_ray.storage.manifest import FileRecord

Stamp = tuple[int, int, int, int]


class VerifiedFile:
    """The file at `path`, of which `open` yields nothing but the bytes that `record` says.

    A file that another has replaced, or whose times have changed, is read once more, whole, to verify it again: a copy
    by hand, or a link to it, changes no byte. `refuse` makes the error of one that differs.
    """

    def __init__(
        self,
        path: Path,
        record: FileRecord,
        refuse: Callable[[FileRecord | None], CorruptArtifact],
        follow: bool = True,
        stamp: Stamp | None = None,
    ):
        """`follow`: false where a symbolic link isn't to be followed. `stamp`: of a file that is verified."""
        self.path, self.record = path, record
        self._refuse, self._follow, self._stamp = refuse, follow, stamp

    @contextmanager
    def open(self) -> Iterator[BufferedReader]:
        """Open it to be read. Raises CorruptArtifact if they differ, also by what happens meanwhile, OSError."""
        # A pipe of that name would wait for its writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if self._follow else os.O_NOFOLLOW)
        with open(os.open(self.path, flags), "rb") as file:
            self._require_same(file)
            file.seek(0)
            yield file
            self._require_same(file)

    @contextmanager
    def opened(self) -> Iterator[str]:
        """The same as a path, for libraries that copy less where they read by themselves. Raises as `open`."""
        with self.open() as file:
            yield f"/dev/fd/{file.fileno()}"

    def verify(self) -> None:
        """Read it, unless that was done and it hasn't changed. Raises as `open`."""
        with self.open():
            pass

    def _require_same(self, file: BufferedReader) -> None:
        before = os.fstat(file.fileno())
        if not stat.S_ISREG(before.st_mode):
            raise self._refuse(None)
        if stamp_of(file.fileno()) == self._stamp:
            return
        file.seek(0)
        record = FileRecord(before.st_size, hashlib.file_digest(file, "sha256").hexdigest())
        if record != self.record:
            raise self._refuse(record)
        self._stamp = _stamp(before)


def stamp_of(descriptor: int) -> Stamp:
    """Values that tell an open file, as it is now, from others and from itself once it is changed."""
    return _stamp(os.fstat(descriptor))


def _stamp(state: os.stat_result) -> Stamp:
    # Not the inode's number, which some network file systems give anew at each opening: taking a name changes ctime.
    return state.st_dev, state.st_size, state.st_mtime_ns, state.st_ctime_ns
