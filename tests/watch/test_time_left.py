"""The time left: right at a steady speed, soon right at another, and it counts down between reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.watch.time_left import TimeLeft


@given(seconds=st.floats(1, 1e6), reports=st.integers(2, 300), begun=st.floats(0, 0.9))
def test_a_steady_speed_is_told_exactly(seconds: float, reports: int, begun: float) -> None:
    left = TimeLeft()
    for number in range(reports):
        left.add(seconds * number / reports, begun + (1 - begun) * number / reports)
    last = seconds * (reports - 1) / reports
    if (1 - begun) / reports >= 0.001:
        assert left.seconds(last) == pytest.approx(seconds / reports, rel=0.01, abs=0.01 * seconds / reports)


def test_it_is_unknown_until_the_share_has_grown() -> None:
    left = TimeLeft()
    assert left.seconds(0.0) is None
    for now in (0.0, 50.0, 100.0):  # a cluster starts, networks load
        left.add(now, 0.25)
        assert left.seconds(now) is None
    left.add(110.0, 0.5)
    assert left.seconds(110.0) == pytest.approx(20.0), "the wait before isn't counted as work"
    left.add(130.0, 1.0)
    assert left.seconds(130.0) is None


def test_it_counts_down_between_reports_until_the_next_is_overdue() -> None:
    left = TimeLeft()
    left.add(0.0, 0.0)
    left.add(10.0, 0.5)
    assert [left.seconds(now) for now in (10.0, 14.0, 30.0)] == [pytest.approx(10.0), pytest.approx(6.0), None]


def test_another_speed_is_learned_in_as_much_time_again() -> None:
    left = TimeLeft()
    for now in range(101):  # a fast part
        left.add(now, 0.5 * now / 100)
    for now in range(101, 221):  # four times as slow
        left.add(now, 0.5 + 0.5 * (now - 100) / 400)
    assert left.seconds(220.0) == pytest.approx(280.0, rel=0.1)


def test_many_reports_take_little_memory() -> None:
    left = TimeLeft()
    for number in range(100_000):
        left.add(number, number / 100_000)
    assert len(left._samples) <= 1001
