"""Verdicts on leases, by counters that change and one observer's own clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.jobs.judge import Lease, Sightings, judge

JOB = "experts/001"


def test_silence_begins_when_an_observer_first_sees_the_counter_as_it_is() -> None:
    seen = Sightings()
    assert [seen.see("a", None, now) for now in (5, 7)] == [0, 2]
    assert [seen.see("a", 1, now) for now in (8, 9)] == [0, 1]
    assert seen.see("b", 1, 100) == 0, "each has a counter of its own"
    assert Sightings().see("a", 2, 200) == 0, "an observer that has just begun to look knows of no silence"


def test_the_first_counter_seen_is_no_change() -> None:
    seen = Sightings()
    changed = []
    for value in (7, 7, 8, 8):
        seen.see("a", value, 0)
        changed.append(seen.changed("a"))
    assert changed == [False, False, True, True]
    assert not seen.changed("b")


@pytest.mark.parametrize(
    ("looks", "verdict"),
    [
        pytest.param([(0, 1)], "silent", id="the first beat may be its last"),
        pytest.param([(0, None), (5, None)], "silent", id="it may not have beaten yet"),
        pytest.param([(0, 1), (5, 2)], "alive", id="a change in sight"),
        pytest.param([(0, 1), (5, 2), (15, 2)], "alive", id="as long as its lease"),
        pytest.param([(0, 1), (5, 2), (15.1, 2)], "dead", id="no longer"),
        pytest.param([(0, 1), (10.1, 1)], "dead", id="never in sight"),
        pytest.param([(0, 1), (30, 1), (31, 2)], "alive", id="it was away"),
        pytest.param([(0, 9), (5, 1)], "alive", id="a counter that was set back"),
    ],
)
def test_one_attempt(looks: list[tuple[float, int | None]], verdict: str) -> None:
    seen = Sightings()
    for now, counter in looks:
        verdicts = judge(JOB, [Lease(1, counter, 10.0)], seen, now)
    assert verdicts == {1: verdict}


def test_one_that_has_ended_is_dead_at_once() -> None:
    assert judge(JOB, [Lease(1, 5, 10.0, ended=True)], Sightings(), 0) == {1: "dead"}


@pytest.mark.parametrize(
    ("newer", "first"),
    [
        pytest.param([Lease(2, 1, 10.0), Lease(2, 2, 10.0)], "alive", id="it beats while it starts"),
        pytest.param([Lease(2, 1, 10.0, step=7)], "alive", id="it trained, perhaps long ago"),
        pytest.param([Lease(2, 1, 10.0, step=7), Lease(2, 2, 10.0, step=8)], "superseded", id="it trains"),
        pytest.param([Lease(2, 1, 10.0, saved=True)], "superseded", id="it has saved a state"),
        pytest.param([Lease(2, 1, 0.0, saved=True, ended=True)], "superseded", id="and ended: its state counts"),
        pytest.param(
            [Lease(2, 1, 10.0, step=7), Lease(2, 2, 10.0, step=8), Lease(2, 2, 10.0, ended=True)],
            "alive",
            id="it trained, and ended without a state",
        ),
    ],
)
def test_an_older_one_beside_a_newer(newer: list[Lease], first: str) -> None:
    seen = Sightings()
    judge(JOB, [Lease(1, -1, 10.0)], seen, -1)
    for now, lease in enumerate(newer):
        verdicts = judge(JOB, [Lease(1, now, 10.0), lease], seen, now)
    assert verdicts[1] == first


Looks = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50)), max_size=20)
Leases = st.lists(
    st.builds(
        Lease,
        st.integers(1, 4),
        st.integers(0, 3),
        st.sampled_from([0.0, 10.0, 60.0]),
        st.none() | st.integers(0, 3),
        st.booleans(),
        st.booleans(),
    ),
    unique_by=lambda lease: lease.number,
)


@given(looks=Looks, offset=st.integers(-(10**6), 10**6))
def test_no_clock_but_differences_of_the_observers_own_count(looks: list[tuple[int, int]], offset: int) -> None:
    """A clock that is days off judges alike."""
    unshifted, shifted = Sightings(), Sightings()
    now, value, since = 0, None, 0
    for counter, pause in looks:
        now += pause
        if value != counter:
            value, since = counter, now
        assert unshifted.see("a", counter, now) == shifted.see("a", counter, now + offset) == now - since


@given(looks=st.lists(Leases, min_size=1, max_size=8))
def test_whatever_is_seen_at_most_the_newest_that_trains_isn_t_superseded(looks: list[list[Lease]]) -> None:
    """Each attempt has a verdict; below one with a state all are superseded; what has ended is never alive."""
    seen = Sightings()
    for now, leases in enumerate(looks):
        verdicts = judge(JOB, leases, seen, 5.0 * now)
        assert verdicts.keys() == {lease.number for lease in leases}
        furthest = max((lease.number for lease in leases if lease.saved), default=0)
        assert all(verdicts[lease.number] == "superseded" for lease in leases if lease.number < furthest)
        assert all(verdicts[lease.number] in ("dead", "superseded") for lease in leases if lease.ended)
