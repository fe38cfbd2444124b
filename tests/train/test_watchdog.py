"""A step that hangs ends the process, a slow one doesn't; and memory that runs out halves what is taken at once."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddm_ray.storage.run import Run
from ddm_ray.train.watchdog import Watchdog
from tests.random_run import make_data

HANGS = """
import sys, time
from ddm_ray.train.watchdog import Watchdog
with Watchdog({seconds}, lambda text: print("stuck:", text, flush=True)) as watchdog:
    for seconds in {steps}:
        with watchdog.step():
            time.sleep(seconds)
print("ended")
"""


def run_steps(seconds: float, steps: list[float]) -> tuple[subprocess.CompletedProcess[str], float]:
    """Steps of these lengths in a process with a watchdog; how it ended, and after how long."""
    began = time.monotonic()
    command = [sys.executable, "-c", HANGS.format(seconds=seconds, steps=steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done, time.monotonic() - began


def test_a_step_that_hangs_ends_the_process() -> None:
    done, took = run_steps(0.5, [0.1, 0.1, 0.1, 50.0])
    assert done.returncode == 1 and done.stdout.startswith("stuck: a step hangs for ") and "ended" not in done.stdout
    assert 'File "<string>", line 7' in done.stderr, "where it hangs is said"
    assert took < 20


def test_steps_may_take_three_times_the_usual() -> None:
    done, _ = run_steps(0.5, [0.5, 0.5, 0.5, 1.7])
    assert (done.returncode, done.stdout) == (0, "ended\n")


def test_the_first_step_may_compile_and_what_is_between_steps_isnt_watched() -> None:
    done, _ = run_steps(0.2, [1.0])
    assert done.returncode == 0
    watchdog = Watchdog(0.1, pytest.fail)
    with watchdog:
        for _ in range(3):
            with watchdog.step():
                pass
        time.sleep(0.5)
    assert watchdog.limit == pytest.approx(0.1, abs=0.05)


def test_running_out_of_memory_halves_what_is_taken_at_once(tmp_path: Path) -> None:
    """The operating system refuses real allocations, in one process an attempt as in life."""
    model = ("expert.model.width=128", "expert.model.depth=4", "expert.model.patch_size=1")
    run = make_data(str(tmp_path / "run"), settings=("expert.train.steps=2", "expert.train.global_batch=512", *model))
    command = [sys.executable, str(Path(__file__).parent / "memory.py"), run.url, "1200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *ran_out, last = map(int, done.stdout.split())
    assert last == 0 and ran_out and ran_out == [256 // 2**number for number in range(len(ran_out))]
    assert Run.open(run.url).require("experts/001").info["step"] == 2
