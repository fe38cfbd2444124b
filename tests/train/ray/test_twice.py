"""Two commands train one expert, and a command is asked to end: no step is lost, and each says where to go on."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddm_ray.exit_codes import EXIT_AGAIN
from ddm_ray.jobs.attempts import Attempt, claimed
from ddm_ray.jobs.status import status
from ddm_ray.run.graph import expert
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from tests.conftest import BIN, Island, ddm, wait_for
from tests.processes import family
from tests.random_run import make_data

pytestmark = pytest.mark.integration
SETTINGS = ("expert.train.steps=1000000", "expert.train.global_batch=12")
JOB = expert(0)


@contextmanager
def training(run: Run, log: Path, island: Island, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`ddm train RUN expert 0` on the island, once its own attempt trains."""
    before = len(claimed(run.store, JOB))
    with log.open("wb") as sink:
        words = [str(BIN / "ddm"), "train", run.url, "expert", "0", "--address", island.ray, *options]
        process = subprocess.Popen(words, stdout=sink, stderr=sink)

    def trains() -> bool:
        job = status(run, JOB).job
        return bool(job and job.attempt > before and job.value("loss"))

    try:
        wait_for(trains, 180, log.read_text)
        yield process
    finally:
        process.kill()
        process.wait()


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
