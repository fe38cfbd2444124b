"""Two commands train one expert, and a command is asked to end: no step is lost, and each says where to go on."""

import fcntl
import os
import pty
import re
import signal
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ddm_ray.cli.leaving import require_no_other_here
from ddm_ray.errors import InTraining
from ddm_ray.exit_codes import EXIT_AGAIN
from ddm_ray.jobs.attempts import Attempt, SavedState, claimed, saved_states
from ddm_ray.jobs.status import status
from ddm_ray.run.graph import expert
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from tests.conftest import BIN, Island, ddm, wait_for
from tests.processes import family
from tests.random_run import make_data

pytestmark = pytest.mark.integration
SETTINGS = ("expert.train.steps=1000000", "expert.train.batch=6")
JOB = expert(0)


@contextmanager
def training(run: Run, log: Path, island: Island, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`ddm train RUN expert 0` on the island, once its own attempt trains."""
    before = len(claimed(run.store, JOB))
    with log.open("wb") as sink:
        words = [str(BIN / "ddm"), "train", run.url, "expert", "0", "--address", island.ray, *options]
        process = subprocess.Popen(words, stdout=sink, stderr=sink)
    try:
        wait_for(lambda: step_of(run, before) > 0, 180, log.read_text)
        yield process
    finally:
        process.kill()
        process.wait()


def step_of(run: Run, before: int) -> int:
    """The step of an attempt after those `before`, once it trains; 0 until then."""
    job = status(run, JOB).job
    return job.step if job and job.attempt > before and job.value("loss") else 0


def end_of(process: subprocess.Popen[bytes], log: Path) -> str:
    """The last line of a command that ends with 75."""
    assert process.wait(180) == EXIT_AGAIN, log.read_text()[-3000:]
    return log.read_text().splitlines()[-1]


def test_a_second_command_is_refused_or_takes_over_and_sigterm_saves(island: Island, tmp_path: Path) -> None:
    run, one, two = make_data(str(tmp_path / "run"), settings=SETTINGS), tmp_path / "one", tmp_path / "two"
    with training(run, one, island) as first:
        for model in ("expert 0", "all"):
            refused = ddm("train", run.url, *model.split(), "--address", island.ray)
            assert refused.returncode == EXIT_AGAIN
            assert f"another command trains experts/000 (process {first.pid} on this machine); " in refused.stderr
            assert "with --take-over" in refused.stderr
        with pytest.raises(InTraining):  # as `all` looks once more before each model begins, hours later
            require_no_other_here(run, JOB)
        assert claimed(run.store, JOB) == [1]
        with training(run, two, island, "--take-over") as second:
            (left,) = re.findall(r"taken over by a command on .*; step (\d+) is saved", end_of(first, one))
            assert claimed(run.store, JOB) == [1, 2]
            for pid in family(second.pid):  # as `ray job stop` does
                os.kill(pid, signal.SIGTERM)
            (step,) = re.findall(r"asked to end; saved are experts/000 at step (\d+);", end_of(second, two))
    state = Attempt(run.store, JOB, 2).state_prefix(int(step))
    assert run.store.exists(f"{state}/{NAME}") and int(step) > int(left)
    assert f"`ddm train {run.url} expert 0` goes on from step {step}" in ddm("status", run.url).stdout


def test_a_closed_terminal_costs_no_step(island: Island, tmp_path: Path) -> None:
    run = make_data(str(tmp_path / "run"), settings=SETTINGS)
    terminal, inner = pty.openpty()
    os.set_blocking(terminal, False)
    shown = bytearray()

    def begin() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as a shell's foreground has it
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def trains() -> bool:
        with suppress(BlockingIOError):
            shown.extend(os.read(terminal, 65536))
        return step_of(run, 0) > 0

    words = [str(BIN / "ddm"), "train", run.url, "expert", "0", "--address", island.ray]
    process = subprocess.Popen(words, stdin=inner, stdout=inner, stderr=inner, start_new_session=True, preexec_fn=begin)
    os.close(inner)
    try:
        wait_for(trains, 180, shown.decode)
        step = step_of(run, 0)
        os.close(terminal)
        assert process.wait(180) == EXIT_AGAIN
    finally:
        process.kill()
        process.wait()
    assert b"saved at step" in shown or b"training" in shown, shown
    saved = [state.step for state in saved_states(run.store, JOB) if isinstance(state, SavedState)]
    assert max(saved) >= step
    assert f"goes on from step {max(saved)}" in ddm("status", run.url).stdout
