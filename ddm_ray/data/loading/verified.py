"""A file on a local disk that matches its manifest, from its verification to its last read."""

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
"""File systems with time stamps of this machine's own clock, which users can't set."""


class VerifiedFile:
    """The file at `path`. `open` yields it only if its bytes are those of `record`.

    If the file was replaced or its times have changed, it is read again as a whole to verify it, since a manual copy,
    or a link to it, doesn't change its bytes. `refuse` makes the error for a file that differs.
    """

    def __init__(
        self,
        path: Path,
        record: FileRecord,
        refuse: Callable[[FileRecord | None], CorruptArtifact],
        follow: bool = True,
        stamp: Stamp | None = None,
    ):
        """`follow`: False to refuse symbolic links. `stamp`: that of a file that is already verified."""
        self.path, self.record = path, record
        self._refuse, self._follow, self._stamp = refuse, follow, stamp

    @contextmanager
    def open(self) -> Iterator[BufferedReader]:
        """Open the file for reading. Raises CorruptArtifact if it differs, now or when the context ends; OSError."""
        # O_NONBLOCK: opening a named pipe would otherwise wait for its writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if self._follow else os.O_NOFOLLOW)
        with open(os.open(self.path, flags), "rb") as file:
            self._require_same(file)
            file.seek(0)
            yield file
            self._require_same(file)

    @contextmanager
    def opened(self) -> Iterator[str]:
        """Open the file as `open` does, and yield its path: some libraries copy less when they open it themselves."""
        with self.open() as file:
            yield f"/dev/fd/{file.fileno()}"

    def verify_once(self, notes: Path) -> None:
        """Read the file once to verify it, unless `notes` say that another process of this user has verified it.

        Of concurrent processes, one reads the file. Files of other users, and files on other machines, are never noted:
        their owners could forge every sign of a change. Raises as `open`.
        """
        with ExitStack() as held:
            descriptor: int | None = None
            with suppress(OSError, StorageError):  # without the folders or the lock, no note is taken
                for folder in (notes.parent, notes):
                    own_folder(folder)
                note = notes / self.record.sha256
                descriptor = held.enter_context(locked(note, fcntl.LOCK_EX))
                held.callback(_remove_empty, note)
                self._stamp = self._stamp or _noted(descriptor)
            known, began = self._stamp, time.time_ns()
            with self.open():  # reads it, unless its stamp is known
                pass
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
    """The stamp in a note; None if the note is new, or a kill cut it off."""
    with suppress(ValidationError):
        stamp = _STAMP.validate_json(os.pread(descriptor, MAX_NOTE_BYTES, 0))
        return stamp if _ours(stamp) else None
    return None


def _ours(stamp: Stamp) -> bool:
    """True for a file of this user on this machine's own disk."""
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
    """Remove an empty note. The caller holds its lock."""
    with suppress(OSError):
        if not note.stat().st_size:
            note.unlink()


def _lasts(stamp: Stamp | None, began: int) -> bool:
    """True if the next change will show: the last change was before the clock tick in which reading began."""
    return stamp is not None and began - max(stamp[-2:]) > SETTLED_NS and _ours(stamp)


def stamp_of(descriptor: int) -> Stamp:
    """Values that distinguish an open file in its current state from other files, and from itself after a change."""
    return _stamp(os.fstat(descriptor))


def _stamp(state: os.stat_result) -> Stamp:
    # Not the inode number: some network file systems change it at each opening. Renaming a file changes ctime.
    return state.st_dev, state.st_uid, state.st_size, state.st_mtime_ns, state.st_ctime_ns
