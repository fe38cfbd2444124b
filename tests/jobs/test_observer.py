"""What an observer asks of storage, and that it never takes the living for dead, or the dead for alive."""

import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddm_ray.config import RunConfig
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.jobs.job_files import list_jobs
from ddm_ray.jobs.observer import Observer
from ddm_ray.jobs.status import SILENT_SECONDS, Status, status
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from ddm_ray.watch.gauges import gauge_values
from tests.jobs.attempts import beat, fail

pytestmark = pytest.mark.contract

DAY = 86400


def observer_of(run: Run, jobs: Sequence[Artifact], least: float = 0.0) -> Observer:
    """An observer of training jobs alone."""

    def listing(known: Sequence[Status]) -> list[Status]:
        files = list_jobs(run.store, jobs)
        return [status(run, job, files[job]) for job in jobs]

    return Observer(run, listing, least)


@pytest.fixture
def run(config: RunConfig) -> Run:
    """A run in memory that nobody has begun."""
    return Run(Store("memory:///"), config)


class Beating:
    """Jobs that beat on, each second."""

    def __init__(self, run: Run):
        self.attempts = {job: claim(run.store, job) for job in run.experts}
        self.beats = 0

    def beat(self) -> None:
        self.beats += 1
        for attempt in self.attempts.values():
            beat(attempt, self.beats, self.beats)


def test_who_looks_each_15_seconds_lists_each_minute(run: Run, requests: Counter[str]) -> None:
    jobs, observer = Beating(run), observer_of(run, run.experts)
    for tick in range(80):
        jobs.beat()
        if tick == 40:
            requests.clear()
        statuses = observer.look(15.0 * tick)
        assert [each.state for each in statuses] == ["begun"] * len(jobs.attempts)
    assert requests["list"] == 10 and not requests["head"]
    assert requests["get"] == 40 * len(jobs.attempts)


def test_who_launches_lists_once_a_minute_and_reads_each_5_seconds(run: Run, requests: Counter[str]) -> None:
    """`ddm train`, by its own rhythm: 0.02 listings a second and 0.2 reads."""
    attempt = claim(run.store, run.experts[0])
    observer, now, beats = observer_of(run, run.experts[:1], least=0.5), 0.0, 0
    while now < 1200:
        beat(attempt, beats := beats + 1, beats)
        before = requests.copy()
        observer.look(now)
        if now < 600:
            requests.clear()
        assert requests["list"] - before["list"] <= 1
        now += observer.pause(now)
    assert requests["list"] <= 11 and requests["get"] <= 121
    assert observer.pause(now) == 5.0


def test_what_has_just_begun_is_looked_at_twice_a_second(run: Run) -> None:
    observer = observer_of(run, run.experts[:1])
    assert observer.pause(10**6) == 0.5
    observer.look(10**6)
    assert observer.pause(10**6 + 20) == 0.5
    assert observer.pause(10**6 + 100) == 2.0
    claim(run.store, run.experts[0])
    observer.look(10**6 + 100)
    assert observer.pause(10**6 + 100) == 0.5


def test_a_change_is_told_with_all_that_a_listing_says(run: Run) -> None:
    job = run.experts[0]
    attempt, observer = claim(run.store, job), observer_of(run, [job])
    beat(attempt, 1, 75)
    observer.look(0)
    beat(attempt, 2, 76)
    assert observer.look(1000)[0].state == "begun"
    fail(attempt, "no space")
    beat(attempt, 3, 77)
    assert observer.look(1001)[0].state == "begun", "not listed yet"
    beat(attempt, 4, 77, phase="publishing")
    assert observer.look(1002)[0].state == "failed", "a heartbeat said that there is news"


def test_another_attempt_is_found_before_its_job_is_called_silent(run: Run) -> None:
    job = run.experts[0]
    attempt, observer = claim(run.store, job), observer_of(run, [job])
    for second in range(601):
        beat(attempt, second, second)
        observer.look(second)
    second_attempt = claim(run.store, job)
    for second in range(601, 660):
        beat(second_attempt, second, second)
        (seen,) = observer.look(second)
        assert not seen.silent
    assert seen.job and seen.job.attempt == 2


def test_one_who_is_told_to_lists(run: Run) -> None:
    job = run.experts[0]
    attempt, observer = claim(run.store, job), observer_of(run, [job])
    for now in (0, 1000):
        beat(attempt, now, 75)
        observer.look(now)
    beat(attempt, 1001, 75)
    fail(attempt, "no space")
    observer.list_next()
    assert observer.look(1001)[0].state == "failed"


Lives = st.lists(st.tuples(st.sampled_from([1.0, 2.5, 5.0]), st.floats(5, 120), st.floats(0, 60)), max_size=3)


@settings(max_examples=60)
@example(lives=[(1.0, 101.0, 4.0), (1.0, 5.0, 12.0)], tick=0.5, offset=0, seed=0)
@given(lives=Lives, tick=st.sampled_from([0.5, 2.0, 15.0]), offset=st.sampled_from([-DAY, 0, DAY]), seed=st.integers())
def test_no_living_job_is_silent_and_no_dead_one_lives(
    config: RunConfig, lives: list[tuple[float, float, float]], tick: float, offset: float, seed: int
) -> None:
    """Attempts that each beat at a pause for a time, then die without a word, and are followed after another time.

    The observer's own clock is a day off, and whoever asks this machine for the time is told another one each time.
    """
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 1.8e9 + chance.choice([-DAY, 0, DAY]))
        run = Run(Store("memory:///"), config)
        job = run.experts[0]
        observer, now, gone = observer_of(run, [job]), 0.0, 0.0
        next_look, noticed = tick, 0.0  # when the attempt is, at the latest: once the one before it is silent

        def look(alive: bool, patience: float) -> None:
            (seen,) = observer.look(now + offset)
            if alive:
                assert not seen.may_be_dead
                assert gauge_values(seen).get("ddm_silent_seconds", 0.0) <= 15
            elif now - max(gone, noticed) > patience + 2 * tick:  # it may have looked just before the last beat
                assert seen.silent and seen.seconds_left is None
                assert gauge_values(seen)["ddm_silent_seconds"] > patience

        for pause, life, away in lives:
            attempt: Attempt = claim(run.store, job)
            patience, ends, number = max(SILENT_SECONDS, 3 * pause), now + life, 0
            while now < ends:
                number += 1
                beat(attempt, number, number, beat_seconds=pause)
                now += pause
                while next_look <= now:
                    next_look += tick
                    look(True, patience)
            gone = now
            while now < gone + away:
                now += tick
                next_look = now + tick
                look(now - gone <= SILENT_SECONDS - pause, patience)
            noticed = max(gone, noticed) + patience + 2 * tick
