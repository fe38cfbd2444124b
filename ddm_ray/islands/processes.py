"""Processes of this machine that belong to an island, by the records of /proc, and their end."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddm_ray.errors import ConfigError

MARKER = "DDM_ISLAND"
"""Environment variable that every process of an island inherits; its value is the island's mark."""
_PROC = Path("/proc")
# What has ended, and waits for a parent that may never ask.
_ENDED = "ZX"
# Fields as `_stat` counts them. The kernel's own processes have no memory. While a program is loaded, its code's end is
# set after its environment's: once that isn't 0, both are known.
_PARENT, _SESSION, _START, _MEMORY, _CODE_END, _ENVIRONMENT_END = 1, 3, 19, 20, 24, 48


@dataclass(frozen=True)
class Process:
    """A living process. `start`, in ticks since the machine's, tells it from another of the same pid."""

    pid: int
    start: int
    parent: int
    session: int
    mark: str = ""


@dataclass(frozen=True)
class Leader:
    """The process that an island began with, which leads a session: `pid` 0 where it is unknown, or of another boot."""

    mark: str
    pid: int = 0
    start: int = 0


def require_proc() -> None:
    """Raise ConfigError on a system without /proc."""
    if not (_PROC / "self/stat").exists():
        raise ConfigError("islands on this machine need Linux: their processes are known by /proc", "use island.sh")


def boot() -> str:
    """The name of this machine's present boot, by which pids of an earlier one are known to be others'."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def read_process(pid: int) -> Process | None:
    """The process of this number; None if there is none, or it has ended."""
    fields = _stat(pid)
    if fields[0] in _ENDED:
        return None
    names = (name.partition(b"=") for name in environment(pid))
    mark = next((value.decode(errors="replace") for name, _, value in names if name == MARKER.encode()), "")
    return Process(pid, int(fields[_START]), int(fields[_PARENT]), int(fields[_SESSION]), mark)


def environment(pid: int, most: float = 1.0) -> list[bytes]:
    """The environment that a process began with, NAME=value each; empty if it has ended or is somebody else's.

    A process that becomes another program has none until that is loaded. That is waited for; after `most` seconds its
    environment counts as empty.
    """
    deadline, program = time.monotonic() + most, "0"
    with suppress(OSError):
        while not (block := (_PROC / str(pid) / "environ").read_bytes()) and time.monotonic() < deadline:
            fields = _stat(pid)
            if fields[0] in _ENDED or fields[_MEMORY] == "0":
                break
            # A program is told from one before it by where its environment ends, once it is loaded.
            before, program = program, fields[_ENVIRONMENT_END] if fields[_CODE_END] != "0" else "0"
            if program == before != "0":
                break  # the same before that look and after it: it began with none
            time.sleep(0.001)
        return [entry for entry in block.split(b"\0") if entry]
    return []


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; of a process that is gone, a state that says so."""
    try:
        # Its name, in parentheses, may hold anything.
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return [_ENDED[0]]


def processes() -> dict[int, Process]:
    """All living processes of this machine, by pid."""
    pids = [int(folder.name) for folder in _PROC.iterdir() if folder.name.isdecimal()]
    return {pid: process for pid in pids if (process := read_process(pid))}


def members(everything: Mapping[int, Process], leader: Leader) -> set[Process]:
    """The processes of an island: with its mark, in its leader's session, or below one of these.

    A process that has written its title over its environment has lost its mark; one in a session of its own has it.
    """
    at_its_pid = everything.get(leader.pid)
    # While a session has members its number is nobody else's; led by a younger process, it is another session.
    same_session = leader.pid > 0 and (at_its_pid is None or at_its_pid.start == leader.start)
    children: dict[int, list[Process]] = {}
    for process in everything.values():
        children.setdefault(process.parent, []).append(process)
    island = {
        process
        for process in everything.values()
        if process.mark == leader.mark
        or (same_session and process.session == leader.pid and process.start >= leader.start)
    }
    below = list(island)
    for process in below:
        below += [child for child in children.get(process.pid, []) if child not in island]
        island.update(below)
    return island


def lives(leader: Leader) -> bool:
    """True while the process that an island began with lives."""
    process = read_process(leader.pid) if leader.pid else None
    return process is not None and process.start == leader.start


def end(leader: Leader, grace: float = 3.0, most: float = 30.0) -> tuple[int, set[Process]]:
    """End an island's processes: SIGTERM, after `grace` seconds SIGKILL, again and again for `most` seconds.

    Returns how many there were at first, and those that still live.
    """

    def look() -> set[Process]:
        # Whoever asks for it from one of its jobs is left to say so.
        return {process for process in members(processes(), leader) if process.pid != os.getpid()}

    first = look()
    _signal(first, signal.SIGTERM)
    began = time.monotonic()
    if not _wait(lambda: not look(), grace):
        while (left := look()) and time.monotonic() - began < grace + most:
            # Those whose parent has just been killed may have had children meanwhile: look again.
            _signal(left, signal.SIGKILL)
            _wait(lambda: not look(), 0.5)
    return len(first), look()


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return done


def _signal(some: Iterable[Process], number: signal.Signals) -> None:
    """Send a signal to each, never to another process that has got its pid meanwhile."""
    for process in some:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(process.pid)
            try:
                now = read_process(process.pid)
                if now is not None and now.start == process.start:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)
