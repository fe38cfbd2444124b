"""A step that hangs ends the process, a slow one doesn't."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ddm_ray.train.watchdog import Watchdog

pytestmark = pytest.mark.contract

HANGS = """
import time
from ctypes import PyDLL
from ddm_ray.train.watchdog import Watchdog
with Watchdog({seconds}, lambda text: print("stuck:", text, flush=True)) as watchdog:
    for step in {steps}:
        with watchdog.{work}:
            eval(step)
        time.sleep({pause})
print("ended")
"""

STOPPED = """
import time
from ddm_ray.train.watchdog import Watchdog
with Watchdog(0.5, print) as watchdog:
    for waits in (4, 4, 4, 12):
        with watchdog.step():
            if waits > 4:
                print("begun", flush=True)
            for _ in range(waits):
                time.sleep(0.05)
print("ended")
"""


WAITS = r"""
import os, subprocess, sys, time
from ddm_ray.train.watchdog import Watchdog
from tests.conftest import wait_for

with Watchdog(0.5, lambda text: print("stuck:", text, flush=True)) as watchdog:
    for _ in range(3):
        with watchdog.step():
            time.sleep(0.05)
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(8 * os.cpu_count())]
    try:
        wait_for(lambda: int(open("/proc/loadavg").read().split()[3].split("/")[0]) >= 6 * os.cpu_count(), 30)
        with watchdog.step():
            time.sleep(2 * watchdog.limit)
    finally:
        for process in busy:
            process.kill()
print("ended")
"""


def run_steps(
    seconds: float, steps: list[str], pause: float = 0.0, work: str = "step()"
) -> tuple[subprocess.CompletedProcess[str], float]:
    """These steps in a process with a watchdog; how it ended, and after how long."""
    began = time.monotonic()
    command = [sys.executable, "-c", HANGS.format(seconds=seconds, steps=steps, pause=pause, work=work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done, time.monotonic() - began


@pytest.mark.parametrize("work", ["step()", "measurement(1.0)"])
def test_a_step_that_hangs_ends_the_process(work: str) -> None:
    done, took = run_steps(0.5, ["time.sleep(0.1)"] * 3 + ["time.sleep(50)"], work=work)
    assert done.returncode == 1 and done.stdout.startswith(f"stuck: a {work.partition('(')[0]} hangs for ")
    assert "ended" not in done.stdout
    assert 'File "<string>", line 8' in done.stderr, "where it hangs is said"
    assert took < 45, "not because the call ended"


def test_steps_may_take_three_times_the_usual() -> None:
    done, _ = run_steps(0.5, ["time.sleep(0.5)"] * 3 + ["time.sleep(1.7)"])
    assert (done.returncode, done.stdout) == (0, "ended\n")


def test_the_first_step_may_compile_and_what_is_between_steps_isnt_watched() -> None:
    done, _ = run_steps(0.5, ["time.sleep(1.5)", "0", "0"], pause=1.0)
    assert (done.returncode, done.stdout) == (0, "ended\n")


def test_a_step_after_forgetting_is_a_first_one() -> None:
    watchdog = Watchdog(0.5, pytest.fail)
    assert watchdog.limit == 600.5
    with watchdog.step():
        time.sleep(0.1)
    assert watchdog.limit == pytest.approx(0.8, abs=0.2)
    usual = watchdog.limit - 0.5
    with watchdog.measurement(100.0):
        assert watchdog.limit == pytest.approx(600.5 + 100 * usual), "as many steps' time, and it may compile"
    with watchdog.step():
        assert watchdog.limit == pytest.approx(0.8, abs=0.2)
    watchdog.forget()
    assert watchdog.limit == 600.5


@contextmanager
def stopped_midway(send: Callable[[int, signal.Signals], None]) -> Iterator["subprocess.Popen[str]"]:
    """A process that is sent SIGSTOP in the midst of a step."""
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        send(process.pid, signal.SIGSTOP)
        try:
            yield process
        finally:
            process.kill()


def test_a_process_that_is_stopped_is_killed() -> None:
    with stopped_midway(os.kill) as process:
        assert process.wait(60) == -signal.SIGKILL


def test_a_machine_that_stands_still_goes_on() -> None:
    """As one that sleeps, or a virtual one that is moved: no time has passed for anyone on it."""
    with stopped_midway(os.killpg) as process:
        time.sleep(3.0)
        os.killpg(process.pid, signal.SIGCONT)
        assert (process.communicate(timeout=60), process.returncode) == (("ended\n", ""), 0)


def test_a_call_that_lets_no_thread_run_is_ended() -> None:
    """What keeps the interpreter to itself, as a driver that hangs may, keeps the watchdog from its work too."""
    done, took = run_steps(0.5, ["PyDLL(None).sleep(50)"])
    assert done.returncode == -signal.SIGKILL and "gave no sign of life for 0.5 s" in done.stderr
    assert took < 45, "not because the call ended"


def test_who_waits_for_others_on_a_crowded_machine_is_not_taken_for_hanging() -> None:
    """As a rank does that waits for one which gets no processor."""
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
