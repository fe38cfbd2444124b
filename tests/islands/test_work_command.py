"""`ddm work` and `ddm islands` as a user runs them, on a real Ray cluster."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.exit_codes import EXIT_AGAIN
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.jobs.status import status
from ddm_ray.run.graph import EXTRAS, Artifact, trained_of
from ddm_ray.run.run import Run
from tests.conftest import BIN, ROOT, Island, ddm, wait_for
from tests.processes import family
from tests.random_run import make_data

pytestmark = pytest.mark.integration

SHORT = ("expert.train.steps=12", "expert.train.batch=6", "router.train.steps=12")
FIRST, SECOND = Artifact("experts/000"), Artifact("experts/001")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_data(str(tmp_path / "run"), settings=SHORT)


def test_an_island_trains_all_that_is_left_model_by_model(island: Island, run: Run) -> None:
    """Each on a place that the one before has freed: the island has none for two. Other tests hold some of it."""
    placement = json.dumps({"resources_per_worker": {"CPU": 3}})
    work = ("work", run.url, "--island", "north", "--address", island.ray, "--placement", placement)
    done = ddm(*work)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "north: all is finished"
    for artifact in trained_of(run.config):
        assert bool(run.finished(artifact)) == (artifact.kind not in EXTRAS)
    assert Attempt(run.store, SECOND, 1).claim()["island"] == "north"
    assert "no island is at work" in call("islands", "list", run.url)[1]


@pytest.mark.chaos
def test_sigterm_saves_a_state_and_ends_with_try_again(island: Island, tmp_path: Path) -> None:
    settings = ("expert.train.steps=1000000", "expert.train.batch=6")
    run, log = make_data(str(tmp_path / "run"), settings=settings), tmp_path / "log"
    command = [str(BIN / "ddm"), "work", run.url, "--island", "north", "--only", "expert:0", "--address", island.ray]
    with log.open("wb") as sink:
        work = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=sink)
    try:

        def trains() -> bool:
            job = status(run, FIRST).job
            return bool(job and job.value("loss"))

        wait_for(trains, 120, log.read_text)
        listed = call("islands", "list", run.url)[1]
        assert listed.startswith("north ") and "trains experts/000" in listed
        for pid in family(work.pid):  # as `ray job stop` does
            os.kill(pid, signal.SIGTERM)
        assert work.wait(120) == EXIT_AGAIN, log.read_text()[-3000:]
    finally:
        work.kill()
        work.wait()
    left = status(run, FIRST)
    assert left.state == "begun" and left.job and left.job.left and left.job.saved > 0
    assert "its process is to end" in str(left.job.failure)


def call(*words: str) -> tuple[int, str]:
    """Exit code and output of a command, here in this process."""
    done = CliRunner().invoke(main, words)
    return done.exit_code, done.output


def test_requests_are_made_and_taken_back_by_words(run: Run) -> None:
    stop = call("islands", "stop", run.url, "expert", "0", "--why", "its rows are looked at")
    assert stop[1].startswith("experts/000 is asked to stop; take that back with: ddm islands resume ")
    assert status(run, FIRST).state == "waiting", "only a listing knows"
    refused = ddm("train", run.url, "expert", "0")
    assert refused.returncode == 1
    assert "experts/000 is stopped, its rows are looked at; take that back with: ddm islands resume" in refused.stderr
    stopped = "stopped     0%  experts/000 is stopped; take that back with: ddm islands resume"
    assert f"{stopped} {run.url} expert 0" in call("status", run.url, "--long")[1]
    assert call("islands", "resume", run.url, "expert", "0") == (0, "experts/000 may be trained again\n")
    assert "there is no request to stop" in call("islands", "resume", run.url, "expert", "0")[1]
    for words, error in (
        (("stop", run.url, "expert", "7"), "expert 7: "),
        (("resume", run.url, "expert", "x"), "expert x: an island's name, or a model"),
        (("drain", run.url, "a/b"), "island 'a/b': use letters, digits, dots, dashes and underscores"),
    ):
        code, text = call("islands", *words)
        assert code == 1 and error in text
    drained = call("islands", "drain", run.url, "north", "--why", "moving day")
    assert "island north is asked to leave; take that back with" in drained[1]
    ended = ddm("work", run.url, "--island", "north")
    assert (ended.returncode, ended.stdout) == (0, "north: island north is drained: moving day\n")
