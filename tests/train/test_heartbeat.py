"""How often an attempt beats, and what it says of it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.storage.attempts import Attempt, claim
from ddm_ray.storage.store import Store
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
