"""When states are painted: early, seldom, for a hundredth of the time at most, and never while training waits."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.train import pictures
from ddm_ray.train.pictures import SHARE, Pictures, marks

PARAMETERS = 1000
VELOCITIES = 320


class Clock:
    """Seconds by a clock that tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Painter:
    """A painter that takes `seconds` for each picture, and notes when it paints."""

    paints = True

    def __init__(self, clock: Clock, seconds: float):
        self.clock, self.seconds = clock, seconds
        self.painted: list[float] = []
        self.lack, self.then = "", lambda: None

    def lack_of_room(self, size: int, free_share: float) -> str:
        assert size == 4 * PARAMETERS and free_share > 0
        return self.lack

    def num_velocities(self) -> int:
        return VELOCITIES

    def paint(self, key: str, size: int, read: Callable[[], bytes], given_up: Callable[[], bool]) -> bool:
        self.then()
        if not given_up():
            self.painted.append(self.clock.now)
            self.clock.now += self.seconds
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pictures, "time", clock)
    monkeypatch.setattr(pictures.dist, "get_world_size", lambda: 2)
    shape = SimpleNamespace(shape=(PARAMETERS,))
    network = SimpleNamespace(named_parameters=lambda: [("weight", shape)])
    monkeypatch.setattr(pictures.weights, "build", lambda spec, device: network)
    return clock


def of(clock: Clock, seconds: float, steps: int, first: int = 0, on: bool = True) -> tuple[Pictures, Painter]:
    """Pictures of an attempt at a job of so many steps of 64 rows on two ranks, which takes a second a step."""
    attempt = SimpleNamespace(store=None, state_prefix=str, picture_key=str)
    job = SimpleNamespace(train=SimpleNamespace(steps=steps), batch=64, spec={})
    painter, membership = Painter(clock, seconds), SimpleNamespace(attempt=attempt, job=job)
    engine: Any = SimpleNamespace(buffers={})
    return Pictures(membership, engine, painter, on, first), painter  # type: ignore[arg-type]


def train(clock: Clock, painted: Pictures, first: int, steps: int) -> None:
    """A state after each step."""
    for step in range(first + 1, steps):
        clock.now += 1.0
        painted.after_state(step)


@given(steps=st.integers(1, 10**6))
def test_few_are_due_and_the_first_ones_early(steps: int) -> None:
    assert marks(0, steps) == 0 and marks(steps, steps) <= 10
    if steps >= 1000:
        due = [marks(round(part * steps), steps) for part in (0.02, 0.04, 0.07, 0.13, 0.26, 0.51, 0.88)]
        assert due == [1, 2, 3, 4, 5, 7, 10]


@pytest.mark.parametrize("seconds", [0.01, 3.0, 100.0])
def test_they_take_a_hundredth_of_the_time_at_most(clock: Clock, seconds: float) -> None:
    painted, painter = of(clock, seconds, 10_000)
    train(clock, painted, 0, 10_000)
    for number, at in enumerate(painter.painted):
        if number:  # the first one is by an estimate
            assert seconds * (number + 1) <= SHARE * at
    assert len(painter.painted) == {0.01: 8, 3.0: 8, 100.0: 1}[seconds]


def test_the_first_one_waits_until_what_it_may_take_is_a_hundredth(clock: Clock) -> None:
    """320 velocities of a row, where a step trains on 32 rows of this rank: 10/3 of a second, or twice that."""
    painted, painter = of(clock, 0.1, 1000)
    train(clock, painted, 0, 1000)
    assert painter.painted[0] == pytest.approx(667, abs=1)


def test_the_next_attempt_paints_what_is_due_from_there(clock: Clock) -> None:
    painted, painter = of(clock, 0.01, 10_000, first=5_000)
    train(clock, painted, 5_000, 10_000)
    assert len(painter.painted) == 3 and painter.painted[0] == pytest.approx(1250, abs=2)


def test_none_is_painted_unwanted_without_room_or_while_training_waits(clock: Clock) -> None:
    painted, painter = of(clock, 0.01, 10_000, on=False)
    train(clock, painted, 0, 10_000)
    assert not painter.painted
    painted, painter = of(clock, 0.01, 10_000)
    painter.lack = "training leaves too little memory"
    train(clock, painted, 0, 5_000)
    painter.lack = ""
    train(clock, painted, 5_000, 10_000)
    assert len(painter.painted) == 4
    painted, painter = of(clock, 0.01, 10_000)
    painter.then = painted.close
    train(clock, painted, 0, 10_000)
    assert not painter.painted


def test_an_error_is_one_warning(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    painted, painter = of(clock, 0.01, 10_000)

    def fails() -> None:
        raise OSError("away")

    painter.then = fails
    train(clock, painted, 0, 10_000)
    assert capsys.readouterr().err == "warning: 667: no picture: away\n"
