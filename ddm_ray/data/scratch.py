"""Folders for this user alone on a local disk, and for what a stage makes on its way; the next removes killed ones'."""

import fcntl
import os
import platform
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from ddm_ray.errors import StorageError
from ddm_ray.remedies import Give
from ddm_ray.store.disk import locked
from ddm_ray.store.refusals import as_storage_error

# Locks of a folder that hosts share may not be: each removes its own leftovers alone.
PREFIX = f"ddm-scratch-{platform.node()}-"
OTHER_SCRATCH = Give("scratch", "choose another folder")
OTHER_CACHE = "choose another folder with `cache`"


@contextmanager
def scratch_folder(below: str | None) -> Iterator[Path]:
    """A new folder, removed in the end; those that killed processes left there are removed first.

    `below`: an existing folder, none: the system's temporary one. Raises StorageError of one line.
    """
    where = Path(below or tempfile.gettempdir())
    for lock in where.glob(f"{PREFIX}*.lock"):
        with suppress(OSError):
            if lock.lstat().st_uid == os.geteuid():
                with locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    _remove(lock)
    lock = where / f"{PREFIX}{uuid.uuid4().hex}.lock"
    with ExitStack() as held:
        with as_scratch_error(where):
            # Locked before there is a folder, so that nobody takes it for one that was left.
            held.enter_context(locked(lock, fcntl.LOCK_EX))
            held.callback(_remove, lock)
            lock.with_suffix("").mkdir(mode=0o700)
        yield lock.with_suffix("")


def as_scratch_error(folder: Path) -> AbstractContextManager[None]:
    """Turn what the local disk refuses in a scratch folder into a StorageError that names it and the way out."""
    return as_storage_error(folder, OTHER_SCRATCH)


def _remove(lock: Path) -> None:
    with suppress(OSError):  # the lock stays where the folder does, for the next to try
        if lock.with_suffix("").exists():
            shutil.rmtree(lock.with_suffix(""))
        lock.unlink(missing_ok=True)


def own_folder(path: Path, shared: bool = False) -> None:
    """Make a folder for this user alone, if it isn't there. Raises StorageError for a link, or for another's folder.

    `shared`: it may be another's, by the user's choice. Raises OSError.
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
    """Take the rights to a file or folder of ours from other users; nothing is done to a link, or to another's."""
    state = path.lstat()
    if stat.S_IMODE(state.st_mode) & 0o077 and state.st_uid == os.geteuid() and not stat.S_ISLNK(state.st_mode):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, stat.S_IMODE(state.st_mode) & 0o700)
        finally:
            os.close(descriptor)
