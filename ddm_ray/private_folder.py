"""The folder of a private Ray: other commands read in it whether its command lives and how many cores it uses."""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from itertools import chain
from pathlib import Path

from ddm_ray.spelling import one_line
from ddm_ray.store.disk import locked
from ddm_ray.store.refusals import ELSEWHERE, as_temporary_error, temporary_folder

PREFIX, LOCK, CORES, LIBRARIES = "ddm-ray-", "lock", "cores", "driver-stderr.log"
MAX_FOLDER_BYTES = 20
"""Longest path of a temporary folder for a private Ray: its sockets lie 85 bytes deeper, and 107 are allowed."""
KEPT_LOGS = 5
"""Number of private Rays of which the logs are kept."""


@contextmanager
def private_folder(cores: float = 0.0) -> Iterator[str]:
    """Make a folder for a private Ray, and remove it in the end. Folders that killed commands left are removed first.

    Their logs are kept, since a Ray that crashed says why only there. `cores`: see `ray_session`.
    """
    for lock in locks():
        with suppress(OSError), locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if (lock.parent / "ray/session_latest/logs").is_dir():
                copy_logs(lock.parent, " of a command that ended abruptly")
            shutil.rmtree(lock.parent, ignore_errors=True)
    place = _place()
    with ExitStack() as stack:
        with as_temporary_error(place, f"{ELSEWHERE}, with a path of {MAX_FOLDER_BYTES} bytes at most"):
            made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=place, ignore_cleanup_errors=True)
            folder = stack.enter_context(made)
            Path(folder, CORES).write_text(f"{os.getpid()} {cores:g}")
            held = Path(folder, "held")
            stack.enter_context(locked(held, fcntl.LOCK_EX))
            held.rename(held.with_name(LOCK))  # other commands see the lock only once it is held
        yield folder


def _place() -> str:
    """The folder below which private folders lie: TMPDIR's, unless sockets below it would have too long a path."""
    folder = temporary_folder()
    return folder if len(os.fsencode(folder)) <= MAX_FOLDER_BYTES else "/tmp"


def busy_cores() -> float:
    """Cores of this machine that this user's other commands keep busy with their private Rays."""
    cores = 0.0
    for lock in locks():
        with suppress(OSError, ValueError):
            pid, each = lock.with_name(CORES).read_text()[:100].split()
            try:
                with locked(lock, fcntl.LOCK_SH | fcntl.LOCK_NB):
                    pass  # its command was killed
            except BlockingIOError:
                cores += float(each) if int(pid) != os.getpid() else 0.0
    return cores


def locks() -> list[Path]:
    """The locks of this user's private folders. Each is held while its command lives."""
    locks = []
    for lock in chain.from_iterable(Path(place).glob(f"{PREFIX}*/{LOCK}") for place in {"/tmp", _place()}):
        with suppress(OSError):
            if {lock.lstat().st_uid, lock.parent.lstat().st_uid} == {os.geteuid()}:
                locks.append(lock)
    return locks


def copy_logs(folder: Path, owner: str = "") -> None:
    """Copy a private Ray's logs to the user's state folder, print the path, and delete the oldest copies."""
    place = Path(f"{datetime.now():%Y-%m-%d-%H%M%S}-{folder.name.removeprefix(PREFIX)}")
    try:
        home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "ddm-ray/logs"
        place = home / place
        home.mkdir(0o700, parents=True, exist_ok=True)
        shutil.copytree(folder / "ray/session_latest/logs", place, symlinks=True)
        if (libraries := folder / LIBRARIES).exists():
            shutil.copy(libraries, place)
        for old in sorted(home.iterdir())[:-KEPT_LOGS]:
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        print(f"warning: {place}: the logs of Ray aren't kept: {one_line(error, 200)}", file=sys.stderr)
    else:
        print(f"the logs of Ray{owner} are kept in {place}", file=sys.stderr)
