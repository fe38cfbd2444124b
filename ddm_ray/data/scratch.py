"""Folders on a local disk: private ones, and temporary ones, which the next process removes after a kill."""

import fcntl
import os
import platform
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from ddm_ray.errors import StorageError
from ddm_ray.remedies import Give
from ddm_ray.store.disk import locked
from ddm_ray.store.refusals import as_storage_error, temporary_folder

# Locks may not work across hosts that share a folder, so each host removes only its own leftovers.
PREFIX = f"ddm-scratch-{platform.node()}-"
OTHER_SCRATCH = Give("scratch", "choose another folder")
OTHER_CACHE = "choose another folder with `cache`"


@contextmanager
def scratch_folder(below: str | None) -> Iterator[Path]:
    """A new folder, removed at the end. Folders left by killed processes are removed first.

    `below`: an existing folder; None: the system's temporary one. Raises StorageError of one line.
    """
    where = Path(below or temporary_folder())
    for lock in where.glob(f"{PREFIX}*.lock"):
        with suppress(OSError):
            if lock.lstat().st_uid == os.geteuid():
                with locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    _remove(lock)
    lock = where / f"{PREFIX}{uuid.uuid4().hex}.lock"
    with ExitStack() as held:
        with as_scratch_error(where):
            # Locked before the folder exists, so that no process takes it for a leftover.
            held.enter_context(locked(lock, fcntl.LOCK_EX))
            held.callback(_remove, lock)
            lock.with_suffix("").mkdir(mode=0o700)
        yield lock.with_suffix("")


def as_scratch_error(folder: Path) -> AbstractContextManager[None]:
    """Turn local disk errors in a scratch folder into a StorageError that names the folder and the remedy."""
    return as_storage_error(folder, OTHER_SCRATCH)


def _remove(lock: Path) -> None:
    with suppress(OSError):  # if the folder can't be removed, its lock stays, so that the next process tries again
        if lock.with_suffix("").exists():
            shutil.rmtree(lock.with_suffix(""))
        lock.unlink(missing_ok=True)


def own_folder(path: Path, shared: bool = False) -> None:
    """Create a folder that only this user can access. Raises StorageError for a link, or another user's folder.

    `shared`: the folder may belong to another user, by this user's choice. Raises OSError.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise StorageError(f"{path}: isn't a folder, but a link or a file; delete it", OTHER_CACHE, passes=False)
    if shared:
        return
    if state.st_uid != os.geteuid():
        raise StorageError(f"{path}: belongs to another user (uid {state.st_uid})", OTHER_CACHE, passes=False)
    close_to_others(path)


def close_to_others(path: Path) -> None:
    """Remove other users' permissions from a file or folder of ours. Links and other users' files stay unchanged."""
    state = path.lstat()
    if stat.S_IMODE(state.st_mode) & 0o077 and state.st_uid == os.geteuid() and not stat.S_ISLNK(state.st_mode):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, stat.S_IMODE(state.st_mode) & 0o700)
        finally:
            os.close(descriptor)
