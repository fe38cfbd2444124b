"""Processes of this machine, by the records of /proc. Imports nothing that has threads: who forks uses it too."""

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path

BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A program that is busy until the one that started it has ended, however that did."""


def forked() -> ForkServerContext:
    """Processes that are forked from one that has imported what trainings import: a process has one such server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.preloaded", "tests.islands.island"])
    return context


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    members = [pid]
    for one in members:
        members += children.get(one, [])
    return members


def command(pid: int) -> str:
    """The command line of a process, empty if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def with_variable(name: str, value: str) -> list[int]:
    """Processes that began with an environment variable of this value."""
    entry, members = f"{name}={value}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                members.append(int(folder.name))
    return members


def state_of(pid: int) -> str:
    """A process's state letter: T if it is stopped, Z if it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def began(pid: int) -> int:
    """When a process began, in ticks since the machine did; 0 if it is gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


@contextmanager
def crowd(number: int) -> Iterator[None]:
    """So many processes that each want a core, meanwhile."""
    # A session each: Linux may share cores between sessions, and many processes of one would be as one.
    busy = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
