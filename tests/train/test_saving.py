"""When states are due by the clock."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.train.saving import YOUNG_SECONDS, SaveClock


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
