"""A file on a local disk that holds what its manifest says, from when it is verified to the last time it is read."""

import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ddm_ray.data.scratch import own_folder
from ddm_ray.errors import CorruptArtifact, StorageError
from ddm_ray.run.manifest import FileRecord
from ddm_ray.store.disk import locked

Stamp = tuple[int, int, int, int, int]
_STAMP: TypeAdapter[Stamp] = TypeAdapter(Stamp)
MAX_NOTE_BYTES = 256
SETTLED_NS = 2 * 10**9
LOCAL = {"ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"}
"""File systems whose changes have this machine's own times, which nobody chooses."""


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

    def verify_once(self, notes: Path) -> None:
        """The same; nor is it read where `notes` say that another process of this user has, and it hasn't changed.

        Of processes that ask at once one reads it. Nothing is noted of other users' files, nor of those that lie on
        other machines: who has these may set all that changes would show by. Raises as `open`.
        """
        with ExitStack() as held:
            descriptor: int | None = None
            with suppress(OSError, StorageError):  # else nothing is noted
                for folder in (notes.parent, notes):
                    own_folder(folder)
                note = notes / self.record.sha256
                descriptor = held.enter_context(locked(note, fcntl.LOCK_EX))
                held.callback(_remove_empty, note)
                self._stamp = self._stamp or _noted(descriptor)
            known, began = self._stamp, time.time_ns()
            self.verify()
            if descriptor is not None and self._stamp != known and _lasts(self._stamp, began):
                with suppress(OSError):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(self._stamp).encode(), 0)

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


def _noted(descriptor: int) -> Stamp | None:
    """The stamp in a note; None in one that a kill cut off, or that is new."""
    with suppress(ValidationError):
        stamp = _STAMP.validate_json(os.pread(descriptor, MAX_NOTE_BYTES, 0))
        return stamp if _ours(stamp) else None
    return None


def _ours(stamp: Stamp) -> bool:
    """True for a file of this user on a disk of this machine."""
    device, user, *_ = stamp
    if user != os.geteuid():
        return False
    where = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == where:
            return kind.split()[0] in LOCAL
    return False


def _remove_empty(note: Path) -> None:
    """Remove a note that says nothing, whose lock is ours."""
    with suppress(OSError):
        if not note.stat().st_size:
            note.unlink()


def _lasts(stamp: Stamp | None, began: int) -> bool:
    """True if the next change will show: the last one was before the tick of a clock in which reading began."""
    return stamp is not None and began - max(stamp[-2:]) > SETTLED_NS and _ours(stamp)


def stamp_of(descriptor: int) -> Stamp:
    """Values that tell an open file, as it is now, from others and from itself once it is changed."""
    return _stamp(os.fstat(descriptor))


def _stamp(state: os.stat_result) -> Stamp:
    # Not the inode's number, which some network file systems give anew at each opening: taking a name changes ctime.
    return state.st_dev, state.st_uid, state.st_size, state.st_mtime_ns, state.st_ctime_ns
