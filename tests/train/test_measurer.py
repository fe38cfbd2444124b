"""A measurer measures when its schedule says so, and reports what it measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from ddm_ray.train.heldout import Schedule
from ddm_ray.train.measurer import Measurer
from ddm_ray.train.step_sync import Agreed, Flags


class Loop:
    """All that a measurer meets: it records in which order it is used."""

    steps = 2.5

    def __init__(self) -> None:
        self.events: list[object] = []
        self.schedule = Schedule(first=4, draws=8, steps=9)
        self.meter = SimpleNamespace(add_heldout=lambda draws, losses_G: self.events.append((draws, losses_G)))

    def say(self, phase: str) -> None:
        self.events.append(phase)

    def report(self) -> None:
        self.events.append("report")

    def measure(self, engine: object) -> list[float]:
        self.events.append(engine)
        return [0.5, 1.5]

    @contextmanager
    def measurement(self, steps: float) -> Iterator[None]:
        self.events.append(steps)
        yield


def measured(loop: Loop, measurer: Measurer) -> list[int]:
    """The steps after which it measured."""
    steps = []
    for done in range(1, 10):
        loop.events.clear()
        measurer.after(done, Agreed((), Flags()))
        if loop.events:
            assert measurer.acts_after(done)
            assert loop.events == ["measuring", 2.5, "engine", (8, [0.5, 1.5]), "report"]
            steps.append(done)
    return steps


def test_it_measures_when_it_is_time() -> None:
    loop = Loop()
    assert measured(loop, Measurer(loop, "engine", loop, loop)) == [4, 8, 9]  # type: ignore[arg-type]


def test_without_held_out_rows_it_never_does() -> None:
    loop = Loop()
    measurer = Measurer(None, "engine", loop, loop)  # type: ignore[arg-type]
    assert measured(loop, measurer) == [] and not measurer.acts_after(4)
