"""When states are due by the clock, and when a saver saves them."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.placement import TrainPlacement
from ddm_ray.train.saver import YOUNG_SECONDS, SaveClock, Saver
from ddm_ray.train.step_sync import Agreed, Flags


@given(
    minutes=st.floats(0.1, 120),
    began=st.floats(-1e6, 1e6),
    pauses=st.lists(st.floats(0.01, 60), min_size=1, max_size=400),
)
def test_what_a_kill_costs_is_bounded(minutes: float, began: float, pauses: list[float]) -> None:
    """By the minutes, or a third of what was trained. Nor is a state due too often."""
    clock, now, saved = SaveClock(minutes, began), began, [began]
    for pause in pauses:
        now += pause
        if clock.due(now):
            assert now - saved[-1] >= min(60 * minutes, YOUNG_SECONDS) - 1e-6
            clock.saved(now)
            saved.append(now)
        lost = now - saved[-1]
        assert lost <= min(60 * minutes, max(YOUNG_SECONDS, (now - began) / 3)) + 1e-6


def test_a_day_of_ten_minutes_costs_a_dozen_states_more() -> None:
    clock, states = SaveClock(10, 0.0), 0
    for second in range(86400):
        if clock.due(second):
            clock.saved(second)
            states += 1
    assert 144 <= states <= 156


def test_no_minutes() -> None:
    assert not SaveClock(math.inf, 0.0).due(1e9)


class Writer:
    """A writer of states that takes `slow` steps for each; records the steps that were saved, and those at once."""

    def __init__(self, slow: int = 0):
        self.slow, self.left = slow, 0
        self.saved: list[int] = []
        self.at_once: list[int] = []
        self.refused = self.unsavable = False

    @property
    def writing(self) -> bool:
        return self.left > 0

    busy = writing

    def save(self, engine: object, progress: int, then: Callable[[], object]) -> None:
        self.saved.append(progress)
        self.left = self.slow
        then()

    def save_now(self, engine: object, progress: int, then: Callable[[], object]) -> None:
        self.at_once.append(progress)
        then()


class Reporter:
    """A reporter whose meter says which step is done."""

    def __init__(self) -> None:
        self.meter = SimpleNamespace(done=0, progress=lambda: self.meter.done)
        self.phases: list[str] = []
        self.uploads = 0

    def say(self, phase: str) -> None:
        self.phases.append(phase)

    def upload_curves(self) -> None:
        self.uploads += 1


def run_saver(
    writer: Writer, steps: int, leave: int | None = None, **placement: Any
) -> tuple[list[int], list[int], list[str]]:
    """Let a saver follow so many steps, of which `leave` is that at which a rank has to leave.

    The steps that were saved beside training, those published, and the phases that were said.
    """
    reporter, published, painted = Reporter(), list[int](), list[int | None]()
    saver = Saver(
        steps,
        TrainPlacement(checkpoint_minutes=0, **placement),
        SimpleNamespace(),  # type: ignore[arg-type]
        writer,  # type: ignore[arg-type]
        SimpleNamespace(publish=published.append),  # type: ignore[arg-type]
        SimpleNamespace(after_state=painted.append, close=lambda: painted.append(None)),  # type: ignore[arg-type]
        reporter,  # type: ignore[arg-type]
    )
    for done in range(1, steps + 1):
        reporter.meter.done = done
        agreed = Agreed((), saver.flags() | Flags(leaving=done == leave))
        before = len(writer.saved) + len(writer.at_once)
        acts = saver.acts_after(done, agreed)
        saver.after(done, agreed)
        assert acts or before == len(writer.saved) + len(writer.at_once), "it says beforehand that it saves"
        writer.left = max(0, writer.left - 1)
        if done == leave:
            break
    beside = [step for step in writer.saved if step not in published]
    assert painted == [*beside, *([None] * len(writer.at_once))], "a milestone has a picture of its own"
    assert reporter.uploads == len(writer.saved) + len(writer.at_once)
    return writer.saved, published, reporter.phases


def test_states_follow_each_so_many_steps_and_milestones() -> None:
    assert run_saver(Writer(), 12, checkpoint_steps=4, milestone_steps=6) == ([4, 6, 8], [6], [])


def test_a_due_state_waits_until_the_one_before_is_written_and_a_milestone_does_not() -> None:
    assert run_saver(Writer(slow=3), 12, checkpoint_steps=2) == ([2, 5, 8, 11], [], [])
    assert run_saver(Writer(slow=3), 12, checkpoint_steps=4, milestone_steps=5) == (
        [4, 5, 8, 10],
        [5, 10],
        ["saving"] * 2,
    )


def test_a_state_is_saved_at_once_before_a_rank_leaves() -> None:
    writer = Writer()
    assert run_saver(writer, 12, leave=6, milestone_steps=6) == ([], [], [])
    assert writer.at_once == [6]


def test_the_last_state_is_not_saved_beside_training() -> None:
    assert run_saver(Writer(), 4, checkpoint_steps=4, milestone_steps=2) == ([2], [2], [])
