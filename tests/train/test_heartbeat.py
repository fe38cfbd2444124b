"""How often an attempt beats, and what it says of it."""

from itertools import count
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.errors import StorageError
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.store.store import Store
from ddm_ray.train import heartbeat
from ddm_ray.train.heartbeat import Heartbeat, beat_seconds
from tests.conftest import wait_for


@given(age=st.floats(0, 1e7), more=st.floats(0, 1e6))
def test_beats_are_rarer_later_and_each_five_seconds_at_least(age: float, more: float) -> None:
    assert 1.0 <= beat_seconds(age) <= beat_seconds(age + more) <= 5.0
    assert beat_seconds(50) == 1.0 and beat_seconds(250) == 5.0


def test_a_beat_says_when_the_next_one_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "beat_seconds", lambda age: 2.5)
    attempt = claim(Store(str(tmp_path)), "experts/000")
    beating = Heartbeat(attempt, {"host": "north"})
    beating.tell("training", step=4)
    beating.close()
    last = attempt.last_beat()
    assert (last["phase"], last["step"], last["host"], last["beat_seconds"]) == ("leaving", 4, "north", 2.5)


def test_phases_without_steps_beat_by_themselves_and_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = []

    class Counting(Attempt):
        def beat(self, progress: dict) -> None:
            beats.append(progress["phase"])

    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    beating = Heartbeat(Counting(Store(str(tmp_path)), "experts/000", 1), {})
    beating.tell("starting")
    wait_for(lambda: len(beats) > 3, 20)
    beating.tell("training")
    wait_for(lambda: "training" in beats, 20)
    for _ in range(3):
        beating.tell("training")
    beating.close()
    assert 1 <= beats.count("training") <= 4 and beats[-1] == "leaving"


def test_beats_that_fail_are_warned_of_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tries = count()

    class Refusing(Attempt):
        def beat(self, progress: dict) -> None:
            if next(tries) % 3:  # storage that comes and goes is no news each time
                raise StorageError("storage is away")

    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.001)
    monkeypatch.setattr(heartbeat, "MAX_BEAT_SECONDS", 0.001)
    beating = Heartbeat(Refusing(Store(str(tmp_path)), "experts/000", 1), {})
    beating.tell("starting")
    wait_for(lambda: next(tries) > 100, 60)
    beating.close()
    failed = [line for line in capfd.readouterr().err.splitlines() if "storage is away" in line]
    assert failed[:3] == [
        "warning: storage is away",
        "warning: storage is away (2 heartbeats failed)",
        "warning: storage is away (4 heartbeats failed)",
    ]
    assert len(failed) < 12


def test_after_a_beat_that_fails_the_next_one_is_later_and_the_end_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "MAX_BEAT_SECONDS", 600.0)
    tries, refused = count(), Event()

    class Refusing(Attempt):
        def beat(self, progress: dict) -> None:
            next(tries)
            refused.set()
            raise StorageError("storage is away")

    beating = Heartbeat(Refusing(Store(str(tmp_path)), "experts/000", 1), {})
    beating.tell("starting")
    assert refused.wait(60)
    for step in range(100):
        beating.tell("training", step=step)
    beating.close()
    assert next(tries) == 2, "the first one, and the last one at once"


def test_storage_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answered = Event()

    class Hanging(Attempt):
        def beat(self, progress: dict) -> None:
            answered.wait(60)

    monkeypatch.setattr(heartbeat, "CLOSE_SECONDS", 0.05)
    beating = Heartbeat(Hanging(Store(str(tmp_path)), "experts/000", 1), {})
    beating.tell("training")
    beating.close()
    answered.set()
    assert "experts/000/attempts/0001: storage is slow" in capfd.readouterr().err
