"""Which processes are an island's, and that all of them end and nobody else."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddm_ray.islands.processes import MARKER, Leader, Process, end, environment, lives, members, read_process
from tests.conftest import wait_for
from tests.processes import began, crowd

MARK = "f" * 32
LEADER = Leader(MARK, pid=100, start=5000)


def table(*processes: Process) -> dict[int, Process]:
    return {process.pid: process for process in processes}


def pids(everything: dict[int, Process], leader: Leader = LEADER) -> set[int]:
    return {process.pid for process in members(everything, leader)}


HEAD = Process(100, 5000, 1, 100, MARK)
RAYLET = Process(101, 5010, 100, 100, MARK)
RETITLED = Process(102, 5020, 101, 100)
DRIVER = Process(103, 5030, 102, 103, MARK)
CHILD = Process(104, 5040, 103, 104)
STRANGER = Process(200, 5025, 1, 200)
OTHERS = Process(201, 5026, 200, 200, "e" * 32)


def test_an_islands_processes_are_known_by_mark_session_and_parent() -> None:
    everything = table(CHILD, DRIVER, HEAD, OTHERS, RAYLET, RETITLED, STRANGER)
    assert pids(everything) == {100, 101, 102, 103, 104}
    orphans = table(
        Process(101, 5010, 1, 100, MARK), Process(102, 5020, 1, 100), Process(103, 5030, 1, 103, MARK), STRANGER
    )
    assert pids(orphans) == {101, 102, 103}, "its head and their parents were killed"


def test_a_pid_that_came_again_is_somebody_elses() -> None:
    """Another process leads a session of the same number: it, its session and its children are spared."""
    everything = table(Process(100, 9000, 1, 100), Process(105, 9010, 100, 100), DRIVER)
    assert pids(everything) == {103}
    elder = table(Process(105, 4000, 1, 100))
    assert pids(elder) == set(), "a session older than the island"


def test_without_a_known_leader_the_mark_alone_counts() -> None:
    everything = table(Process(1, 1, 0, 0), Process(2, 1, 0, 0), HEAD, STRANGER)
    assert pids(everything, Leader(MARK)) == {100}
    assert pids(everything, Leader("a" * 32)) == set()


# A head whose child ignores SIGTERM, and whose grandchild has a session of its own; both print their pids.
FAMILY = """
import os, signal, subprocess, sys, time
deaf = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                         " print('deaf', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
deaf.stdout.readline()
apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(deaf.pid, apart.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def kin() -> Iterator[tuple[Leader, list[int]]]:
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY],
        env={**os.environ, MARKER: MARK},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as head:
        assert head.stdout
        below = [int(pid) for pid in head.stdout.readline().split()]
        try:
            yield Leader(MARK, head.pid, began(head.pid)), [head.pid, *below]
        finally:
            for pid in (head.pid, *below):
                if read_process(pid) is not None:
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("headless", [False, True])
def test_all_that_began_with_it_ends(kin: tuple[Leader, list[int]], headless: bool) -> None:
    leader, family = kin
    stranger = subprocess.Popen(["sleep", "600"], env={**os.environ, MARKER: "e" * 32}, start_new_session=True)
    try:
        assert lives(leader) and not lives(Leader(MARK, leader.pid, leader.start + 1))
        if headless:
            os.kill(leader.pid, signal.SIGKILL)
            wait_for(lambda: not lives(leader), 10)
        assert end(leader, grace=0.3) == (2 if headless else 3, set())
        assert [read_process(pid) for pid in family] == [None] * 3
        assert read_process(stranger.pid) is not None
        assert end(leader) == (0, set())
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_as_the_system_has_it() -> None:
    own = read_process(os.getpid())
    assert own is not None
    assert (own.start, own.parent, own.session) == (began(os.getpid()), os.getppid(), os.getsid(0))
    odd = Path("/proc/self/comm").read_text()
    try:
        Path("/proc/self/comm").write_text("a) R (b 1 2")
        assert read_process(os.getpid()) == own
    finally:
        Path("/proc/self/comm").write_text(odd.strip())


def test_a_process_that_is_still_being_loaded_has_its_mark() -> None:
    """Popen returns before the system has set the environment: on a busy machine many have none yet."""
    with crowd(2 * (os.cpu_count() or 1)):
        for _ in range(40):
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={**os.environ, MARKER: MARK}) as young:
                process = read_process(young.pid)
                young.communicate()
            assert process is not None and process.mark == MARK


def test_a_process_that_began_without_an_environment_has_none() -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as bare:
        assert bare.stdin and bare.stdout
        bare.stdin.write(b"\n")
        bare.stdin.flush()
        bare.stdout.readline()
        began_with = environment(bare.pid, most=60)
        bare.stdin.close()
        assert began_with == []
    assert environment(bare.pid, most=60) == []


def stat(state: str = "R", memory: int = 4096, code_end: int = 0, environment_end: int = 0) -> str:
    """Fields of /proc/PID/stat as proc(5) numbers them, from 1."""
    known = {1: "7", 2: "(a program)", 3: state, 23: str(memory), 27: str(code_end), 51: str(environment_end)}
    return " ".join(known.get(number, str(1000 + number)) for number in range(1, 53))


LOADED, LATER = stat(code_end=5, environment_end=90), stat(code_end=5, environment_end=80)


@pytest.mark.parametrize(
    ("looks", "entries"),
    [
        pytest.param([(stat(), "")] + [(stat(environment_end=9), "")] * 4, 1, id="slow"),
        pytest.param([(LOADED, "")], 1, id="loaded between the two files' reading"),
        pytest.param([(LOADED, ""), (stat(), ""), (LATER, "")], 1, id="again another program"),
        pytest.param([(LOADED, ""), (LATER, "")], 1, id="another program, unseen"),
        pytest.param([(LOADED, ""), (LOADED, "")], 0, id="none"),
        pytest.param([(stat(), ""), (LOADED, ""), (LOADED, "")], 0, id="none, slow"),
        pytest.param([(stat(memory=0), "")], 0, id="the kernel's"),
        pytest.param([(stat(state="Z", memory=0), "")], 0, id="ended"),
        pytest.param([(stat(), ""), (stat(state="X"), "")], 0, id="ended meanwhile"),
    ],
)
def test_looks_at_a_process_until_what_it_began_with_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, looks: list[tuple[str, str]], entries: int
) -> None:
    """Each look finds the next of these, and had it been known before the last, no look would have followed."""
    folder, left = tmp_path / "7", [*looks, (LOADED, "A=1\0")]
    folder.mkdir()

    def go_on(seconds: float) -> None:
        (folder / "stat").write_text(left[0][0])
        (folder / "environ").write_text(left.pop(0)[1])

    go_on(0)
    monkeypatch.setattr("ddm_ray.islands.processes._PROC", tmp_path)
    monkeypatch.setattr("ddm_ray.islands.processes.time", SimpleNamespace(monotonic=time.monotonic, sleep=go_on))
    assert environment(7, most=60) == [b"A=1"] * entries
    assert len(left) == 1 - entries


def test_a_process_that_is_never_loaded_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text(stat())
    (tmp_path / "7/environ").touch()
    monkeypatch.setattr("ddm_ray.islands.processes._PROC", tmp_path)
    clock = count()
    monkeypatch.setattr("ddm_ray.islands.processes.time", SimpleNamespace(monotonic=clock.__next__, sleep=float))
    assert environment(7, most=60) == []
    assert next(clock) == 61, "asked at its start, and then until 60 have passed"
