"""Surveys in, events out: no clock, no network, no storage."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.errors import CorruptArtifact
from ddm_ray.jobs.job_status import JobStatus
from ddm_ray.jobs.judge import Sightings
from ddm_ray.jobs.observer import observe
from ddm_ray.jobs.status import Status
from ddm_ray.run.graph import Artifact
from ddm_ray.watch.events import Event, Events
from tests.infos import info_of

JOB = Artifact("experts/000")
RUN = "s3://lab/run"
WAITING = Status(JOB, "waiting", run=RUN)
FINISHED = Status(JOB, "finished", info_of(JOB, step=300, loss=0.5, attempts=2), run=RUN)
DAMAGED = Status(JOB, "damaged", error=CorruptArtifact("altered"), run=RUN)


def begun(attempt: int, beat: int | None, step: int = 0, artifact: str = JOB, rate: float = 10.0) -> Status:
    spoken = {"beat": beat, "step": step, "steps": 300, "attempt": attempt, "steps_per_second": rate}
    heartbeat: dict[str, Any] = {} if beat is None else spoken
    return Status(Artifact(artifact), "begun", job=JobStatus(attempt, heartbeat, None, None, 0), run=RUN)


def stopped(attempt: int, beat: int | None = None, step: int = 0) -> Status:
    running = begun(attempt, beat, step)
    assert running.job
    failed = {"error": "no space", "kind": "StorageError", "final": False, "attempt": attempt}
    return replace(running, state="failed", job=replace(running.job, failure=failed))


class Watcher:
    """An observer of one run, and the events that its looks bring."""

    def __init__(self, run: str = "run", stalled_after: float = 60):
        self._events, self._pulses = Events(run, stalled_after), Sightings()

    def look(self, now: float, *statuses: Status) -> list[Event]:
        return self._events.seen(observe(statuses, self._pulses, now))


def events_of(*surveys: tuple[float, Status], stalled_after: float = 60) -> list[tuple[float, str, int]]:
    """(time, event, attempt) of all that these surveys of one artifact bring."""
    watcher = Watcher(stalled_after=stalled_after)
    return [(now, e.event, e.attempt) for now, status in surveys for e in watcher.look(now, status)]


@pytest.mark.parametrize(
    ("surveys", "expected"),
    [
        pytest.param([(0, WAITING), (99, WAITING)], [], id="nobody began it"),
        pytest.param([(0, begun(1, 1)), (59, begun(1, 1)), (60, begun(1, 1))], [(60, "stalled", 1)], id="dies"),
        pytest.param([(0, begun(1, 1)), (59, begun(1, 2)), (118, begun(1, 3))], [], id="beats slowly"),
        pytest.param([(0, begun(1, 1)), (60, begun(1, 1)), (500, begun(1, 1))], [(60, "stalled", 1)], id="said once"),
        pytest.param(
            [(now, begun(1, beat, rate=0.02)) for now, beat in ((0, 1), (140, 1), (149, 2), (298, 2), (299, 2))],
            [(299, "stalled", 1)],
            id="steps of 50 s",
        ),
        pytest.param([(0, begun(1, None)), (70, begun(1, None))], [(70, "stalled", 1)], id="never beats"),
        pytest.param(
            [(0, begun(1, 7)), (60, begun(1, 7)), (61, begun(1, 8)), (121, begun(1, 8))],
            [(60, "stalled", 1), (61, "resumed", 1), (121, "stalled", 1)],
            id="hangs, goes on, dies",
        ),
        pytest.param(
            [(0, begun(1, 7)), (60, begun(1, 7)), (70, begun(2, None)), (80, begun(2, 1)), (90, FINISHED)],
            [(60, "stalled", 1), (80, "resumed", 2), (90, "finished", 2)],
            id="dies, and another goes on",
        ),
        pytest.param(
            [(0, begun(1, 7)), (60, begun(1, 7)), (70, begun(2, None)), (130, begun(2, None))],
            [(60, "stalled", 1), (130, "stalled", 2)],
            id="dies, and so does the next before it beats",
        ),
        pytest.param(
            [(0, begun(1, 7)), (1, stopped(1, 7)), (2, stopped(1, 7)), (99, stopped(1, 7))],
            [(1, "failed", 1)],
            id="fails",
        ),
        pytest.param(
            [(0, begun(1, 7)), (1, stopped(1, 7)), (9, stopped(2)), (10, stopped(3)), (11, begun(4, 1))],
            [(1, "failed", 1), (9, "failed", 2), (10, "failed", 3), (11, "resumed", 4)],
            id="fails, and the next ones at once",
        ),
        pytest.param(
            [(0, begun(1, 7)), (60, begun(1, 7)), (61, stopped(1, 7)), (62, begun(2, 1)), (63, stopped(2, 2))],
            [(60, "stalled", 1), (61, "failed", 1), (62, "resumed", 2), (63, "failed", 2)],
            id="stalls, then fails",
        ),
        pytest.param([(0, stopped(3)), (9, stopped(3))], [(0, "failed", 3)], id="had failed when watching began"),
        pytest.param([(0, FINISHED), (9, FINISHED)], [], id="was finished when watching began"),
        pytest.param([(0, WAITING), (9, FINISHED), (10, FINISHED)], [(9, "finished", 2)], id="finished unseen"),
        pytest.param([(0, FINISHED), (1, WAITING), (2, FINISHED)], [(2, "finished", 2)], id="made anew"),
        pytest.param(
            [(0, begun(1, 1)), (9, DAMAGED), (99, DAMAGED), (100, begun(1, 1))],
            [(9, "damaged", 0), (100, "stalled", 1)],
            id="can't be read for a while",
        ),
    ],
)
def test_what_is_told(surveys: list[tuple[float, Status]], expected: list[tuple[float, str, int]]) -> None:
    assert events_of(*surveys) == expected


def test_an_event_says_all_that_is_known() -> None:
    watcher = Watcher("s3://lab/run")
    assert watcher.look(0, begun(2, 5, 75)) == []
    (stalled,) = watcher.look(60, begun(2, 5, 75))
    text = f"s3://lab/run: {JOB} stalled, no sign for 60 s: silent for 60 s, step 75/300, attempt 2; if it died, "
    text += f"trained again, {JOB} starts from step 0"
    assert stalled.body() == {
        "run": "s3://lab/run",
        "artifact": JOB,
        "event": "stalled",
        "attempt": 2,
        "step": 75,
        "steps": 300,
        "text": text,
        "final": False,
    }
    (failed,) = watcher.look(61, stopped(2, 5, 75))
    assert failed == Event(
        "s3://lab/run", JOB, "failed", 2, 75, 300, f"s3://lab/run: {JOB} failed: no space, attempt 2, "
        f"at step 75/300; trained again, {JOB} starts from step 0"
    )  # fmt: skip
    (damaged,) = watcher.look(62, DAMAGED)
    assert damaged.alarm and damaged.text == f"s3://lab/run: {JOB} damaged: altered"
    (finished,) = watcher.look(63, FINISHED)
    assert (finished.step, finished.steps, finished.alarm, failed.alarm) == (300, 300, False, True)
    assert finished.text == f"s3://lab/run: {JOB} finished: 300 steps, loss 0.5000, 1.0 GFLOP in 2 s"


def test_artifacts_are_judged_apart() -> None:
    watcher = Watcher()
    first, second = begun(1, 1), begun(1, 1, artifact="router")
    assert watcher.look(0, first, second) == []
    assert [e.artifact for e in watcher.look(60, first, begun(1, 2, artifact="router"))] == [JOB]
    assert [e.artifact for e in watcher.look(120, first, begun(1, 2, artifact="router"))] == ["router"]


@given(
    st.lists(
        st.tuples(
            st.floats(0, 100),
            st.one_of(
                st.just(WAITING),
                st.just(DAMAGED),
                st.just(FINISHED),
                st.builds(begun, st.integers(1, 3), st.one_of(st.none(), st.integers(1, 4))),
                st.builds(stopped, st.integers(1, 3), st.one_of(st.none(), st.integers(1, 4))),
            ),
        ),
        max_size=30,
    )
)
def test_no_event_is_told_twice_in_a_row(steps: Sequence[tuple[float, Status]]) -> None:
    """And each fits the state that it is told in, whatever comes after what."""
    watcher, now, last = Watcher(), 0.0, None
    for pause, status in steps:
        now += pause
        for event in watcher.look(now, status):
            state = {"stalled": "begun", "resumed": "begun"}.get(event.event, event.event)
            assert status.state == state
            if event.event == "resumed":
                assert last and last[0] in ("stalled", "failed", "damaged")
            if event.event != "finished":
                assert (event.event, event.attempt) != last
            last = event.event, event.attempt
