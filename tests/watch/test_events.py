"""Surveys in, events out: no clock, no network, no storage."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.storage.progress import Progress
from ddm_ray.storage.status import Status
from ddm_ray.watch.events import Event, Events

JOB = "experts/000"
WAITING = Status(JOB, "waiting", {}, None, "ddm train")
FINISHED = Status(JOB, "finished", {"step": 300, "loss": 0.5, "training_flops": 1e9, "attempts": 2}, None, "ddm train")
DAMAGED = Status(JOB, "damaged", {"error": "altered"}, None, "ddm train")


def begun(attempt: int, beat: int | None, step: int = 0, artifact: str = JOB, rate: float = 10.0) -> Status:
    spoken = {"beat": beat, "step": step, "steps": 300, "attempt": attempt, "steps_per_second": rate}
    told: dict[str, Any] = {} if beat is None else spoken
    return Status(artifact, "begun", {}, Progress(attempt, told, None, None, 0, 0.0), "ddm train")


def stopped(attempt: int, beat: int | None = None, step: int = 0) -> Status:
    found = begun(attempt, beat, step)
    assert found.progress
    failed = {"error": "no space", "kind": "StorageError", "final": False, "attempt": attempt}
    return replace(found, state="failed", progress=replace(found.progress, failure=failed))


def told(*surveys: tuple[float, Status], stalled_after: float = 60) -> list[tuple[float, str, int]]:
    """(time, event, attempt) of all that these surveys of one artifact bring."""
    events = Events("run", stalled_after)
    return [(now, e.event, e.attempt) for now, found in surveys for e in events.seen([found], now)]


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
    assert told(*surveys) == expected


def test_an_event_says_all_that_is_known() -> None:
    events = Events("s3://lab/run", 60)
    assert events.seen([begun(2, 5, 75)], 0) == []
    (stalled,) = events.seen([begun(2, 5, 75)], 60)
    text = f"s3://lab/run: {JOB} stalled, no sign for 60 s: step 75/300, 10 steps/s, 22 s left, attempt 2"
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
    (failed,) = events.seen([stopped(2, 5, 75)], 61)
    assert failed == Event(
        "s3://lab/run", JOB, "failed", 2, 75, 300, f"s3://lab/run: {JOB} failed: no space, attempt 2, "
        "at step 75/300; `ddm train`, with its --islands and --island, begins again"
    )  # fmt: skip
    (damaged,) = events.seen([DAMAGED], 62)
    assert damaged.alarm and damaged.text == f"s3://lab/run: {JOB} damaged: altered"
    (finished,) = events.seen([FINISHED], 63)
    assert (finished.step, finished.steps, finished.alarm, failed.alarm) == (300, 300, False, True)
    assert finished.text == f"s3://lab/run: {JOB} finished: 300 steps, loss 0.5000, 1.0 GFLOP"


def test_artifacts_are_judged_apart() -> None:
    events = Events("run", 60)
    first, second = begun(1, 1), begun(1, 1, artifact="router")
    assert events.seen([first, second], 0) == []
    assert [e.artifact for e in events.seen([first, begun(1, 2, artifact="router")], 60)] == [JOB]
    assert [e.artifact for e in events.seen([first, begun(1, 2, artifact="router")], 120)] == ["router"]


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
    events, now, last = Events("run", 60), 0.0, None
    for pause, found in steps:
        now += pause
        for event in events.seen([found], now):
            state = {"stalled": "begun", "resumed": "begun"}.get(event.event, event.event)
            assert found.state == state
            if event.event == "resumed":
                assert last and last[0] in ("stalled", "failed", "damaged")
            if event.event != "finished":
                assert (event.event, event.attempt) != last
            last = event.event, event.attempt
