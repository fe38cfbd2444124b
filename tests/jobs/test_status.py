"""What `ddm status` says of training jobs: alive, silent, stopped, finished; and that it reads storage alone."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event, Thread

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.cli.fixes import phrase
from ddm_ray.config import load_recipe
from ddm_ray.errors import CorruptArtifact
from ddm_ray.jobs import describe as describe_module
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.job_files import list_jobs
from ddm_ray.jobs.judge import Sightings
from ddm_ray.jobs.observer import observe, survey_once
from ddm_ray.jobs.status import status, survey
from ddm_ray.run.graph import PARTITION, REPORT, ROUTER, ROWS, Artifact, owner_rows, shard
from ddm_ray.run.run import Run
from ddm_ray.spelling import duration
from tests.conftest import wait_for
from tests.jobs.attempts import age, beat, fail, publish, save
from tests.run.artifacts import write_and_commit

JOB = Artifact("experts/001")


def status_line(run: Run, artifact: str = JOB) -> str:
    """State, share done and description of an artifact."""
    artifact_status = status(run, artifact)
    return f"{artifact_status.state} {artifact_status.fraction:.0%} {describe(artifact_status)}"


def test_a_job_that_trains(partitioned: Run) -> None:
    assert status_line(partitioned) == "waiting 0% waiting"
    attempt = claim(partitioned.store, JOB)
    assert status_line(partitioned) == "begun 0% starting, attempt 1"
    attempt.beat({"beat": 1, "phase": "starting", "step": 0, "steps": 300, "first": 0, "world_size": 1})
    assert status_line(partitioned) == "begun 0% starting at step 0/300, 1 worker, attempt 1"
    beat(attempt, 2, 75)
    training = "step 75/300, loss 0.1235, 12.5 steps/s, 18 s left, 2 workers, MFU 41%, attempt 1"
    assert status_line(partitioned) == f"begun 25% {training}"
    beat(attempt, 3, 75, heldout_loss=0.54321, heldout_error=0.01, heldout_step=60)
    measured = training.replace("0.1235,", "0.1235, held out 0.5432 (EMA weights of step 60),")
    assert status_line(partitioned) == f"begun 25% {measured}"
    beat(attempt, 3, 75, heldout_loss=0.54321, heldout_step=-1)
    assert "held out 0.5432 (EMA weights), " in status_line(partitioned)
    beat(attempt, 3, 75, heldout_loss="as others may write it", heldout_step=-1)
    assert status_line(partitioned) == f"begun 25% {training}"
    beat(attempt, 3, 75, unmeasured="too few rows")
    assert "loss 0.1235, no held-out loss: too few rows, 12.5 steps/s" in status_line(partitioned)
    beat(attempt, 3, 75, uncompiled="there is no triton")
    assert "2 workers, MFU 41%, uncompiled: there is no triton, attempt 1" in status_line(partitioned)
    beat(attempt, 3, 75, mfu=None, steps_per_second=0.0)
    assert status_line(partitioned) == "begun 25% step 75/300, loss 0.1235, 2 workers, attempt 1"
    publish(attempt, 60)
    beat(attempt, 4, 80, phase="saving")
    assert status_line(partitioned) == (
        "begun 27% saving at step 80/300, loss 0.1235, 2 workers, weights of step 60, attempt 1"
    )
    beat(attempt, 5, 300, phase="publishing")
    assert status_line(partitioned).startswith("begun 99% publishing at step 300/300, loss 0.1235")
    attempt.beat({"beat": 9, "step": 75, "steps": 300})
    assert status_line(partitioned) == "begun 25% step 75/300, weights of step 60, attempt 1"


class Observer:
    """Looks at a job again and again, by a clock that it sets itself."""

    def __init__(self, run: Run):
        self._run, self._pulses = run, Sightings()

    def look(self, now: float) -> str:
        """State, share done and description of the job."""
        (observed,) = observe([status(self._run, JOB)], self._pulses, now)
        return f"{observed.state} {observed.fraction:.0%} {describe(observed)}"


def test_silence_on_a_full_disk_is_explained(partitioned: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever trains there can't say it: a heartbeat has no room either."""
    observer = Observer(partitioned)
    beat(claim(partitioned.store, JOB), 1, 75)
    monkeypatch.setattr(describe_module, "BEAT_BYTES", 2**62)
    assert observer.look(0).startswith("begun 25% step 75/300"), "while it beats it has room"
    full = f"begun 25% no space left on the disk of {partitioned.url}, silent for 210 s, step 75/300"
    assert observer.look(210).startswith(full)
    monkeypatch.undo()
    assert observer.look(211).startswith("begun 25% silent for 211 s")


def test_a_job_that_died_does_not_look_alive(partitioned: Run) -> None:
    """Whatever storage's clock says, which may be days off this machine's."""
    attempt, observer = claim(partitioned.store, JOB), Observer(partitioned)
    beat(attempt, 1, 75)
    age(Path(partitioned.url), -86400)
    alive = "begun 25% step 75/300, loss 0.1235, 12.5 steps/s, 18 s left, 2 workers, MFU 41%, attempt 1"
    assert observer.look(1000) == observer.look(1005) == alive
    age(Path(partitioned.url), 2 * 86400)
    again = f"if it died, trained again, {JOB}"
    silent = "begun 25% silent for 210 s, step 75/300, loss 0.1235, 2 workers, attempt 1"
    assert observer.look(1210) == f"{silent}; {again} starts from step 0"
    save(attempt, 50)
    assert observer.look(1210).endswith(f"{again} goes on from step 50")
    beat(attempt, 2, 75, phase="saving")
    assert observer.look(1211).startswith("begun 25% saving at step 75/300")
    assert observer.look(1231).startswith("begun 25% silent for 20 s, saving at step 75/300")
    beat(attempt, 3, 76)
    assert observer.look(1232).startswith("begun 25% step 76/300")
    claim(partitioned.store, JOB)
    assert observer.look(1240) == "begun 17% starting at step 50/300, attempt 2"
    assert observer.look(1270) == "begun 17% starting at step 50/300, no sign for 30 s, attempt 2"
    assert observer.look(1271).startswith("begun 17% silent for 31 s, starting at step 50/300, attempt 2; ")


def test_a_job_that_saves_or_leaves_is_not_silent_at_once(partitioned: Run) -> None:
    attempt, observer = claim(partitioned.store, JOB), Observer(partitioned)
    beat(attempt, 1, 75, phase="saving")
    observer.look(0)
    assert observer.look(10).startswith("begun 25% saving at step 75/300")
    assert observer.look(11).startswith("begun 25% silent for 11 s, saving at step 75/300")
    attempt.fail({"error": "asked to leave", "kind": "Preempted", "final": False})
    assert observer.look(30).startswith("begun 25% leaving at step 75/300")
    assert observer.look(31).startswith("begun 25% silent for 31 s, leaving at step 75/300")


def test_slow_steps_are_no_silence(partitioned: Run) -> None:
    attempt, observer = claim(partitioned.store, JOB), Observer(partitioned)
    beat(attempt, 1, 75, steps_per_second=0.05)
    alive = "begun 25% step 75/300, loss 0.1235, 0.05 steps/s, "
    assert observer.look(0).startswith(f"{alive}75 min left")
    assert observer.look(60).startswith(f"{alive}no sign for 60 s, 75 min left")
    assert observer.look(61).startswith("begun 25% silent for 61 s, step 75/300")


class Clock:
    """A clock that only sleepers move; `events` happen when it reaches their time."""

    def __init__(self, events: dict[float, Callable[[], None]]):
        self.now, self._events = 0.0, dict(sorted(events.items()))

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for due in [due for due in self._events if due <= self.now]:
            self._events.pop(due)()


def test_who_looks_once_sees_who_lives(partitioned: Run) -> None:
    """It waits no longer than it takes to judge: until each has beaten, or has been silent for too long."""
    live, other = (claim(partitioned.store, artifact) for artifact in (JOB, ROUTER))
    beat(live, 1, 75)
    beat(other, 1, 10)

    def looked(events: dict[float, Callable[[], None]]) -> tuple[float, list[str]]:
        clock = Clock(events)
        descriptions = {each.artifact: describe(each) for each in survey_once(partitioned, clock, clock.sleep)}
        return clock.now, [descriptions[artifact].split(",")[0] for artifact in (JOB, ROUTER)]

    both = {1.0: lambda: beat(live, 2, 80), 1.5: lambda: beat(other, 2, 20)}
    assert looked(both) == (1.5, ["step 80/300", "step 20/300"])
    assert looked({1.0: lambda: beat(live, 3, 90)}) == (10.5, ["step 90/300", "silent for 10 s"])
    assert looked({1.0: lambda: fail(live, "no rows"), 2.0: lambda: beat(other, 3, 30)}) == (
        5.0,
        ["failed: no rows", "step 30/300"],
    ), "only a listing tells of a failure"
    beat(other, 4, 31, steps_per_second=0.1)
    assert looked({}) == (30.5, ["failed: no rows", "silent for 30 s"]), "three of its steps"
    fail(other, "no rows")
    assert looked({})[0] == 0.0


def test_who_looks_once_does_not_take_a_job_of_slow_steps_for_alive(partitioned: Run) -> None:
    """Its machine may have died a week ago."""
    attempt, clock = claim(partitioned.store, JOB), Clock({})
    beat(attempt, 1, 75, steps_per_second=0.01)
    save(attempt, 50)
    (unjudged,) = [each for each in survey_once(partitioned, clock, clock.sleep) if each.artifact == JOB]
    assert clock.now == 60.0 and unjudged.unjudged and unjudged.seconds_left is None
    assert describe(unjudged) == (
        "no sign for 60 s of looking, step 75/300, loss 0.1235, 2 workers, attempt 1;"
        f" if it died, trained again, {JOB} goes on from step 50"
    )
    clock = Clock({59.5: lambda: beat(attempt, 2, 76, steps_per_second=0.01)})
    (living,) = [each for each in survey_once(partitioned, clock, clock.sleep) if each.artifact == JOB]
    assert describe(living).startswith("step 76/300, loss 0.1235, 0.01 steps/s, 6.2 h left")


def test_a_job_that_failed_says_why_and_what_goes_on(partitioned: Run) -> None:
    first = claim(partitioned.store, JOB)
    fail(first, "no rows")
    command = f"trained again, {JOB}"
    assert status_line(partitioned) == f"failed 0% failed: no rows, attempt 1; {command} starts from step 0"
    second = claim(partitioned.store, JOB)
    beat(second, 1, 75)
    save(second, 50)
    fail(second, "the disk is full")
    age(Path(partitioned.url), 500)
    assert status_line(partitioned) == (
        f"failed 25% failed: the disk is full, attempt 2, at step 75/300; {command} goes on from step 50"
    )
    fail(second, "gradient norm nan at step 76", final=True)
    assert status_line(partitioned) == (
        "failed 25% failed: gradient norm nan at step 76, attempt 2, at step 75/300; once that is mended, "
        f"{command} goes on from step 50"
    )
    third = claim(partitioned.store, JOB)
    assert status_line(partitioned) == "begun 17% starting at step 50/300, attempt 3"
    beat(third, 1, 51)
    assert status_line(partitioned).startswith("begun 17% step 51/300, loss 0.1235, 12.5 steps/s")


def test_a_failure_keeps_what_mends_it(partitioned: Run) -> None:
    error = CorruptArtifact("a file of rows is gone", partitioned.remake(ROWS))
    claim(partitioned.store, JOB).fail(error.to_fields() | {"final": True})
    artifact_status = status(partitioned, JOB)
    again = f"`ddm train {partitioned.url} expert 1` starts from step 0"
    assert describe(artifact_status, phrase) == (
        f"failed: a file of rows is gone; delete {partitioned.url}/rows, then: ddm prepare {partitioned.url},"
        f" attempt 1; once that is mended, {again}"
    )


def test_what_is_finished_does_not_change_with_what_attempts_left(partitioned: Run) -> None:
    attempt = claim(partitioned.store, JOB)
    write_and_commit(partitioned, JOB, {"attempts/0001/weights/x": b"x"})
    before = status(partitioned, JOB)
    assert (before.state, before.fraction, before.job) == ("finished", 1.0, None)
    fail(attempt, "after the commit")
    partitioned.store.write(f"{attempt.prefix}/HEARTBEAT", b"{")
    assert status(partitioned, JOB) == before


def test_a_survey_does_not_look_twice_at_what_is_finished(partitioned: Run) -> None:
    first = survey(partitioned)
    assert [surveyed.artifact for surveyed in first] == [
        "rows",
        "partition",
        "experts/000",
        JOB,
        "router",
        "monolith",
        "student",
    ]
    beat(claim(partitioned.store, JOB), 1, 3)
    (Path(partitioned.url) / "rows/part-0.parquet").unlink()
    states = {surveyed.artifact: surveyed.state for surveyed in survey(partitioned, first)}
    assert (states["rows"], states[JOB], states["router"]) == ("finished", "begun", "waiting")
    assert survey(partitioned)[0].state == "damaged"


def test_what_an_owner_gave_the_manifest_of_alone_is_not_damaged(tmp_path: Path) -> None:
    run = Run.create(str(tmp_path / "run"), load_recipe("tiny", ("partition.method=given",)))
    given = (owner_rows(0), shard(0))
    for artifact in given:
        write_and_commit(run, artifact, {"a.parquet": b"rows", "b.parquet": b"rows"})

    def states() -> list[str]:
        return [surveyed.state for surveyed in survey(run) if surveyed.artifact in given]

    for number, artifact in enumerate(given):
        (Path(run.url) / artifact / "a.parquet").unlink()
        assert states()[number] == "damaged", "one file of several is gone"
        (Path(run.url) / artifact / "b.parquet").unlink()
        assert states()[number] == "finished"


def test_a_report_is_looked_at_once_it_is_committed(partitioned: Run) -> None:
    partitioned.store.write(f"{REPORT}/report.html", b"an older version's: a file of the partition")
    assert REPORT not in [surveyed.artifact for surveyed in survey(partitioned)]
    write_and_commit(partitioned, REPORT, {"report.html": b"<html>"})
    states = {surveyed.artifact: surveyed.state for surveyed in survey(partitioned)}
    assert list(states)[:4] == [ROWS, PARTITION, REPORT, "experts/000"] and states[REPORT] == "finished"
    for damage in (lambda path: path.write_bytes(b"<ht"), Path.unlink):
        damage(Path(partitioned.url) / REPORT / "report.html")
        (damaged,) = [surveyed for surveyed in survey(partitioned) if surveyed.artifact == REPORT]
        remedy = f"mend it with: ddm doctor {partitioned.url} --deep --mend"
        assert damaged.state == "damaged"
        assert describe(damaged, phrase) == f"report.html: gone or cut short; {remedy}"


def test_a_reference_of_other_features_is_not_judged(partitioned: Run) -> None:
    """`ddm compare --features` leaves one in the first run."""
    partitioned.store.write("references/other/_MANIFEST.json", b"of other features")
    assert not [surveyed for surveyed in survey(partitioned) if surveyed.artifact.startswith("references")]


def test_looking_on_asks_for_one_heartbeat_a_job(partitioned: Run, requests: Counter[str]) -> None:
    """As a launcher does that shows its jobs: all else about them is in the one listing that it made."""
    for artifact in partitioned.experts:
        attempt = claim(partitioned.store, artifact)
        beat(attempt, 1, 75)
        save(attempt, 50)
    files = list_jobs(partitioned.store, partitioned.experts)
    requests.clear()
    statuses = [status(partitioned, artifact, files[artifact]) for artifact in partitioned.experts]
    assert [surveyed.state for surveyed in statuses] == ["begun"] * len(statuses)
    assert requests["get"] == len(statuses)
    assert not requests["list"]
    requests.clear()
    survey(partitioned)
    assert requests["list"] <= 8, "one for all experts, and others for what isn't trained"


@contextmanager
def beating(attempt: Attempt) -> Iterator[None]:
    """An attempt that gives signs of life, ten a second."""
    ended = Event()

    def beat_on() -> None:
        for number in count(1):
            beat(attempt, number, 75)
            if ended.wait(0.1):
                return

    thread = Thread(target=beat_on)
    thread.start()
    try:
        wait_for(attempt.last_beat, 10)
        yield
    finally:
        ended.set()
        thread.join()


def test_the_command_tells_it_all_from_storage(partitioned: Run) -> None:
    fail(claim(partitioned.store, JOB), "[Errno 28] no space left")
    with beating(claim(partitioned.store, ROUTER)):
        done = CliRunner().invoke(main, ["status", partitioned.url, "--long"])
        watched = CliRunner().invoke(main, ["watch", partitioned.url, "--once"])
    assert done.exit_code == 0
    assert re.search(rf"^  {JOB} +failed +0%  failed: \[Errno 28\] no space left, attempt 1; `ddm", done.output, re.M)
    assert re.search(r"^  router +begun +25%  step 75/300, .*MFU 41%, attempt 1$", done.output, re.M)
    assert watched.output.splitlines() == [line.strip() for line in done.output.splitlines()[1:]]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (599, "599 s"), (600, "10 min"), (7100, "118 min"), (7200, "2.0 h"), (172800, "2.0 days")],
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
