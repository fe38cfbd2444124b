"""Which launches train an artifact now: those of living processes here, and elsewhere those that beat."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from ddm_ray.errors import Left, Preempted, Stopped, TrainingError
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.jobs.launches import Launch, noted
from ddm_ray.jobs.living_launches import LivingLaunch, living_launches
from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run
from tests.jobs.attempts import beat

JOB = expert(0)
ELSEWHERE = {"processes": "another boot pid:[1]"}


def begun(run: Run, after: int = 0, **record: Any) -> Launch:
    """A launch of another command, by default of this process's parent, which lives."""
    launch = Launch(JOB, after=after)
    with noted(run.store, launch):
        record = {**launch.begun(run.store), "pid": os.getppid(), **record}
    run.store.write(launch.begun_key, json.dumps(record).encode())
    return launch


def attempt_of(run: Run, launch: Launch) -> Attempt:
    attempt = claim(run.store, JOB, launch.claim_fields())
    beat(attempt, 1, 10)
    return attempt


class Time:
    """A clock that a sleep moves on; each sleep calls `passing`."""

    def __init__(self, passing: Callable[[], object] = lambda: None):
        self.now, self._passing = 0.0, passing

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._passing()

    def launches(self, run: Run) -> list[LivingLaunch]:
        return living_launches(run.store, [JOB, expert(1)], lambda: self.now, self.sleep)


def test_a_launch_on_this_machine_lives_as_long_as_its_process(partitioned: Run) -> None:
    """Also before its first attempt; one of this process doesn't count."""
    assert not Time().launches(partitioned)
    begun(partitioned, pid=os.getpid())
    begun(partitioned, pid=2**22 + 1)
    assert not Time().launches(partitioned)
    begun(partitioned)
    (one,) = Time().launches(partitioned)
    assert one == LivingLaunch(JOB, f"process {os.getppid()} on this machine", None)


def test_an_attempt_elsewhere_lives_if_it_beats_within_its_lease(partitioned: Run) -> None:
    begun(partitioned, **ELSEWHERE)  # one without an attempt can't be known
    launch = begun(partitioned, host="n7", island="north", **ELSEWHERE)
    attempt, time, beats = attempt_of(partitioned, launch), Time(), iter(range(2, 100))
    assert not time.launches(partitioned)
    assert 1 <= time.now <= 15
    (one,) = Time(lambda: beat(attempt, next(beats), 20)).launches(partitioned)
    assert one == LivingLaunch(JOB, "island north, host n7", attempt)


@pytest.mark.parametrize(
    ("error", "lives"),
    [
        (TrainingError("the loss isn't finite"), False),
        (Stopped("by hand"), False),
        (Left("drained"), False),
        (Preempted("its node goes"), True),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_launch_whose_attempt_ended_lives_if_another_attempt_follows(
    partitioned: Run, error: TrainingError, lives: bool
) -> None:
    attempt = attempt_of(partitioned, begun(partitioned))
    assert [each.attempt for each in Time().launches(partitioned)] == [attempt]
    attempt.fail({"error": str(error), "kind": type(error).__name__, "final": not error.passes})
    assert bool(Time().launches(partitioned)) == lives


def test_a_launch_that_gave_up_or_was_followed_by_an_attempt_is_over(partitioned: Run) -> None:
    begun(partitioned).give_up(partitioned.store, TrainingError("no room"))
    begun(partitioned)
    own = Launch(JOB)
    attempt_of(partitioned, own)
    assert not Time().launches(partitioned)


def test_an_attempt_without_a_launch_lives_if_it_beats(partitioned: Run) -> None:
    """As one that a process trains without Ray."""
    attempt, beats = claim(partitioned.store, JOB), iter(range(2, 100))
    beat(attempt, 1, 10)
    assert not Time().launches(partitioned)
    (one,) = Time(lambda: beat(attempt, next(beats), 20)).launches(partitioned)
    assert one.attempt == attempt
    attempt.fail({"error": "x", "kind": "TrainingError", "final": False})
    assert not Time().launches(partitioned)
