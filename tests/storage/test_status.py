"""What `ddm status` says of training jobs: alive, silent, stopped, finished; and that it reads storage alone."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.storage.attempts import claim
from ddm_ray.storage.run import Run
from ddm_ray.storage.status import describe, duration, status, survey
from tests.storage.artifacts import write_and_commit
from tests.storage.jobs import age, beat, fail, publish, save

JOB = "experts/001"


def said(run: Run, artifact: str = JOB) -> str:
    """State, share done and description of an artifact."""
    found = status(run, artifact)
    return f"{found.state} {found.fraction:.0%} {describe(found)}"


def test_a_job_that_trains(partitioned: Run) -> None:
    assert said(partitioned) == "waiting 0% waiting"
    attempt = claim(partitioned.store, JOB)
    assert said(partitioned) == "begun 0% starting, attempt 1"
    attempt.beat({"beat": 1, "phase": "starting", "step": 0, "steps": 300, "first": 0, "world_size": 1})
    assert said(partitioned) == "begun 0% starting at step 0/300, 1 worker, attempt 1"
    beat(attempt, 2, 75)
    training = "step 75/300, loss 0.1235, 12.5 steps/s, 18 s left, 2 workers, MFU 41%, attempt 1"
    assert said(partitioned) == f"begun 25% {training}"
    beat(attempt, 3, 75, mfu=None, steps_per_second=0.0)
    assert said(partitioned) == "begun 25% step 75/300, loss 0.1235, 2 workers, attempt 1"
    publish(attempt, 60)
    beat(attempt, 4, 80, phase="saving")
    assert said(partitioned) == (
        "begun 27% saving at step 80/300, loss 0.1235, 2 workers, weights of step 60, attempt 1"
    )
    beat(attempt, 5, 300, phase="publishing")
    assert said(partitioned).startswith("begun 99% publishing at step 300/300, loss 0.1235")
    attempt.beat({"beat": 9, "step": 75, "steps": 300})
    assert said(partitioned) == "begun 25% step 75/300, weights of step 60, attempt 1"


def test_a_job_that_died_does_not_look_alive(partitioned: Run) -> None:
    attempt = claim(partitioned.store, JOB)
    beat(attempt, 1, 75)
    age(Path(partitioned.url), 210)
    again = f"if it died, `ddm train {partitioned.url} expert 1`, with its --islands and --island,"
    found = said(partitioned)
    told = re.fullmatch(r"begun 25% silent for (\d+) s, step 75/300, loss 0.1235, 2 workers, attempt 1; (.*)", found)
    assert told, found
    assert 210 <= int(told[1]) < 240
    assert told[2] == f"{again} begins again"
    assert status(partitioned, JOB).seconds_left is None
    save(attempt, 50)
    assert said(partitioned).endswith(f"{again} goes on from step 50")
    beat(attempt, 2, 75, phase="saving")
    age(Path(partitioned.url), 20)
    assert re.match(r"begun 25% silent for 2\d s, saving at step 75/300", said(partitioned))
    beat(attempt, 3, 76)
    assert said(partitioned).startswith("begun 25% step 76/300")


def test_slow_steps_are_no_silence(partitioned: Run) -> None:
    attempt = claim(partitioned.store, JOB)
    beat(attempt, 1, 75, steps_per_second=0.05)
    age(Path(partitioned.url), 40)
    assert said(partitioned).startswith("begun 25% step 75/300, loss 0.1235, 0.05 steps/s, 75 min left")
    age(Path(partitioned.url), 21)
    assert said(partitioned).startswith("begun 25% silent for 6")


def test_a_job_that_failed_says_why_and_what_goes_on(partitioned: Run) -> None:
    first = claim(partitioned.store, JOB)
    fail(first, "no rows")
    command = f"`ddm train {partitioned.url} expert 1`, with its --islands and --island,"
    assert said(partitioned) == f"failed 0% failed: no rows, attempt 1; {command} begins again"
    second = claim(partitioned.store, JOB)
    beat(second, 1, 75)
    save(second, 50)
    fail(second, "the disk is full")
    age(Path(partitioned.url), 500)
    assert said(partitioned) == (
        f"failed 25% failed: the disk is full, attempt 2, at step 75/300; {command} goes on from step 50"
    )
    fail(second, "gradient norm nan at step 76", final=True)
    assert said(partitioned) == (
        "failed 25% failed: gradient norm nan at step 76, attempt 2, at step 75/300; once that is mended, "
        f"{command} goes on from step 50"
    )
    third = claim(partitioned.store, JOB)
    assert said(partitioned) == "begun 17% starting at step 50/300, attempt 3"
    beat(third, 1, 51)
    assert said(partitioned).startswith("begun 17% step 51/300, loss 0.1235, 12.5 steps/s")


def test_what_is_finished_does_not_change_with_what_attempts_left(partitioned: Run) -> None:
    attempt = claim(partitioned.store, JOB)
    write_and_commit(partitioned, JOB, {"attempts/0001/weights/x": b"x"})
    before = status(partitioned, JOB)
    assert (before.state, before.fraction, before.progress) == ("finished", 1.0, None)
    fail(attempt, "after the commit")
    partitioned.store.write(f"{attempt.prefix}/HEARTBEAT", b"{")
    assert status(partitioned, JOB) == before


def test_a_survey_does_not_look_twice_at_what_is_finished(partitioned: Run) -> None:
    first = survey(partitioned)
    assert [found.artifact for found in first] == ["rows", "partition", "experts/000", JOB, "router", "monolith"]
    beat(claim(partitioned.store, JOB), 1, 3)
    (Path(partitioned.url) / "rows/part-0.parquet").unlink()
    states = {found.artifact: found.state for found in survey(partitioned, first)}
    assert (states["rows"], states[JOB], states["router"]) == ("finished", "begun", "waiting")
    assert survey(partitioned)[0].state == "damaged"


def test_the_command_tells_it_all_from_storage(partitioned: Run) -> None:
    beat(claim(partitioned.store, "router"), 1, 75)
    fail(claim(partitioned.store, JOB), "[Errno 28] no space left")
    done = CliRunner().invoke(main, ["status", partitioned.url])
    assert done.exit_code == 0
    assert re.search(rf"^  {JOB} +failed +0%  failed: \[Errno 28\] no space left, attempt 1; `ddm", done.output, re.M)
    assert re.search(r"^  router +begun +25%  step 75/300, .*MFU 41%, attempt 1$", done.output, re.M)
    watched = CliRunner().invoke(main, ["watch", partitioned.url, "--once"])
    assert watched.output.splitlines() == [line.strip() for line in done.output.splitlines()[1:]]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (599, "599 s"), (600, "10 min"), (7100, "118 min"), (7200, "2.0 h"), (172800, "2.0 days")],
)
def test_times_for_people(seconds: float, said: str) -> None:
    assert duration(seconds) == said
