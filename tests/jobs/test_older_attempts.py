"""An attempt that trains on beside a newer one is told as the job; one that died isn't, however its counter stands."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from ddm_ray.cli.fixes import phrase
from ddm_ray.config import RunConfig
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.observer import MAX_OLDER, Observer, survey_once
from ddm_ray.jobs.status import Status, survey
from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from ddm_ray.watch.events import Events
from tests.jobs.attempts import beat, fail, save

JOB = expert(1)


@pytest.fixture
def run(config: RunConfig) -> Run:
    return Run(Store("memory:///"), config)


class Onlooker:
    """Who looks at a run again and again, by a clock of their own, and what they hear of it."""

    def __init__(self, run: Run, least: float = 0.0):
        self._observer, self._events = Observer(run, partial(survey, run), least), Events("run", 60)
        self.heard: list[tuple[float, str, int]] = []

    def look(self, now: float) -> Status:
        statuses = self._observer.look(now)
        self.heard += [(now, event.event, event.attempt) for event in self._events.seen(statuses)]
        return next(each for each in statuses if each.artifact == JOB)


def says_nothing(_: Attempt) -> None:
    """The end of a newer attempt that is killed before its first beat."""


def beats_once(attempt: Attempt) -> None:
    """The end of one that is killed while it starts."""
    beat(attempt, 1, 0, phase="starting", island="south")


def fails(attempt: Attempt) -> None:
    """The end of one that says why."""
    beat(attempt, 1, 0, phase="starting", island="south")
    fail(attempt, "no space", final=True)


def fails_at_once(attempt: Attempt) -> None:
    """The end of one that says why before its first beat."""
    fail(attempt, "no space")


def is_tried_again(attempt: Attempt) -> None:
    """The end of one after which its launch tries again, in vain, until it gives up."""
    for each in (attempt, *(claim(attempt.store, attempt.job) for _ in range(2))):
        beats_once(each)


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (says_nothing, "the newer attempt 2 gives no sign of life"),
        (beats_once, "the newer attempt 2 on island south, host north gives no sign of life"),
        (fails, "the newer attempt 2 on island south, host north failed: no space"),
        (fails_at_once, "the newer attempt 2 failed: no space"),
        (is_tried_again, "the newer attempt 4 on island south, host north gives no sign of life"),
    ],
)
def test_one_that_trains_on_is_the_job_until_it_dies(run: Run, ends: Callable[[Attempt], None], words: str) -> None:
    living, onlooker, now = claim(run.store, JOB), Onlooker(run), 0.0

    def train_until(end: float) -> Status:
        nonlocal now
        while now < end:
            now += 2
            beat(living, int(now), int(now), island="north")
            seen = onlooker.look(now)
        return seen

    train_until(100)
    save(living, 50)
    ends(claim(run.store, JOB))
    seen = train_until(200)
    assert (seen.state, seen.silent, seen.fraction) == ("begun", False, 200 / 300)
    trains = "step 200/300, loss 0.1235, 12.5 steps/s, 8 s left, 2 workers, MFU 41%, saved at step 50, "
    assert describe(seen, phrase) == f"{trains}attempt 1 on island north, host north; {words}"
    silent = onlooker.look(260)
    assert silent.silent and describe(silent).startswith("silent for 60 s, step 200/300")
    assert describe(silent).endswith(f"; {words}; if it died, trained again, {JOB} goes on from step 50")
    assert onlooker.heard[-1] == (260, "stalled", 1), "whatever was told of the newer one"
    newest = claim(run.store, JOB)
    assert describe(onlooker.look(320)).startswith("starting at step 50/300")
    beat(newest, 1, 51)
    assert describe(onlooker.look(322)).startswith("step 51/300")


def test_a_failure_is_taken_back_once_an_older_one_is_seen_to_train(run: Run) -> None:
    living, onlooker = claim(run.store, JOB), Onlooker(run)
    beat(living, 1, 50)
    fail(claim(run.store, JOB), "no space")
    first = onlooker.look(0)
    assert first.state == "failed", "the first beat that one sees may be a year old"
    assert describe(first) == (
        f"failed: no space, attempt 2, at step 0/300; attempt 1 may train on; trained again, {JOB} starts from step 0"
    )
    beat(living, 2, 51)
    assert onlooker.look(2).state == "begun"
    assert onlooker.heard == [(0, "failed", 2), (2, "resumed", 1)]


def test_a_heartbeat_that_is_damaged_or_gone_is_no_sign_of_life(run: Run) -> None:
    older, onlooker = claim(run.store, JOB), Onlooker(run)
    beat(older, 1, 50)
    newest = claim(run.store, JOB)
    beat(newest, 1, 0)
    fail(newest, "no space")
    key = f"{older.prefix}/HEARTBEAT"
    assert onlooker.look(0).older == (1,)
    for now, change in ((1, lambda: run.store.write(key, b"{")), (2, lambda: run.store.delete_one(key))):
        change()
        assert onlooker.look(now).state == "failed"


def test_of_hundreds_that_died_few_are_asked_for(run: Run, requests: Counter[str]) -> None:
    for _ in range(30):
        beat(claim(run.store, JOB), 1, 0)
    onlooker = Onlooker(run, least=60)
    onlooker.look(0)
    requests.clear()
    onlooker.look(1)
    assert requests["get"] == 1 + MAX_OLDER


def test_a_restart_is_told_as_one(run: Run) -> None:
    """The dead one beat on unseen, between the last look and its death."""
    dead, onlooker = claim(run.store, JOB), Onlooker(run)
    beat(dead, 1, 50)
    onlooker.look(0)
    beat(dead, 2, 51)
    assert onlooker.look(15).job
    beat(dead, 9, 58)
    newest = claim(run.store, JOB)
    assert describe(onlooker.look(90)) == "starting at step 0/300, attempt 2"
    assert describe(onlooker.look(115)) == "starting at step 0/300, no sign for 25 s, attempt 2"
    beat(newest, 1, 1)
    onlooker.look(119)
    beat(newest, 2, 2)
    assert describe(onlooker.look(120)).startswith("step 2/300") and not onlooker.heard
    silent = onlooker.look(200)
    assert silent.job and (silent.job.attempt, silent.silent) == (2, True)
    assert [event for _, event, _ in onlooker.heard] == ["stalled"]


def test_what_moved_while_the_newest_lived_is_no_sign_of_life(run: Run) -> None:
    older, onlooker = claim(run.store, JOB), Onlooker(run)
    beat(older, 1, 50)
    newest = claim(run.store, JOB)
    onlooker.look(0)
    beat(newest, 1, 1)
    onlooker.look(1)
    beat(older, 2, 51)
    for now in (30, 45):
        seen = onlooker.look(now)
        assert seen.silent and seen.job and seen.job.attempt == 2


def test_one_whose_place_a_newer_one_took_by_a_state_is_not_asked_for(run: Run) -> None:
    older, newest, onlooker = claim(run.store, JOB), claim(run.store, JOB), Onlooker(run)
    beat(newest, 1, 50)
    save(newest, 50)
    for now in range(20):
        beat(older, now, now)
        seen = onlooker.look(now)
    assert seen.silent and seen.job and seen.job.attempt == 2 and not seen.older


def test_an_older_one_costs_a_request_while_the_newest_is_in_doubt(run: Run, requests: Counter[str]) -> None:
    older, onlooker = claim(run.store, JOB), Onlooker(run, least=60)
    beat(older, 1, 1)
    newest = claim(run.store, JOB)
    beat(newest, 1, 1)

    def asked(now: float) -> tuple[bool, int]:
        """Whether a look lists, and how much it reads."""
        requests.clear()
        onlooker.look(now)
        return requests["list"] > 0, requests["get"]

    onlooker.look(0)
    assert asked(5) == (False, 2), "it has beaten, but was never seen to"
    beat(newest, 2, 2)
    assert asked(6) == (False, 1)
    for now, listed in ((40, True), (41, True), (42, False), (43, False)):
        beat(older, now, now)
        lists, reads = asked(now)
        assert lists == listed, "where it falls silent, and another one takes its place"
    assert reads == 2
    fail(newest, "no space")
    for now in (110, 111):
        beat(older, now, now)
        lists_and_reads = asked(now)
    assert lists_and_reads == (False, 1), "what has failed is not read again"


def test_who_looks_once_waits_for_an_older_one(run: Run) -> None:
    class Clock:
        now, events = 0.0, dict[float, Callable[[], None]]()

        def sleep(self, seconds: float) -> None:
            self.now += seconds
            self.events.pop(self.now, lambda: None)()

    def looked(**events: Callable[[], None]) -> tuple[float, str]:
        clock = Clock()
        clock.events = {float(at.removeprefix("at_")): event for at, event in events.items()}
        statuses = {each.artifact: each for each in survey_once(run, lambda: clock.now, clock.sleep)}
        return clock.now, describe(statuses[JOB])

    older, newest = claim(run.store, JOB), claim(run.store, JOB)
    beat(older, 1, 50)
    now, text = looked(at_1=lambda: beat(older, 2, 51))
    assert now == 1 and text.startswith("step 51/300") and text.endswith("attempt 2 gives no sign of life")
    beat(newest, 1, 0, phase="starting")
    now, text = looked()
    assert now == 30.5 and text.startswith("silent for 30 s, starting"), "the older was after 10 s"
    fail(newest, "no space")
    now, text = looked(at_3=lambda: beat(older, 3, 53))
    assert now == 3 and text.startswith("step 53/300") and text.endswith("attempt 2 failed: no space")
    assert looked() == (10.5, f"failed: no space, attempt 2, at step 0/300; trained again, {JOB} starts from step 0")
    beat(older, 4, 54, steps_per_second=0.01)
    assert looked()[0] == 60
    assert "; attempt 1 may train on; trained again, " in looked()[1]
