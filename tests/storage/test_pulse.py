"""Who lives, by a counter that changes and one observer's own clock."""

from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.storage.pulse import Pulses


def test_silence_begins_when_an_observer_first_sees_the_counter_as_it_is() -> None:
    pulses = Pulses()
    assert [pulses.take("a", 1, None, now) for now in (5, 7)] == [0, 2]
    assert [pulses.take("a", 1, 1, now) for now in (8, 9)] == [0, 1]
    assert pulses.take("b", 1, 1, 100) == 0, "each job has a pulse of its own"
    assert pulses.take("a", 2, None, 110) == 0, "a new attempt is a sign of life"
    assert pulses.take("a", 2, None, 111) == 1
    assert Pulses().take("a", 2, None, 200) == 0, "who has just begun to look knows of no silence"


def test_the_first_counter_seen_is_no_movement() -> None:
    pulses = Pulses()
    seen = []
    for attempt, beat in ((1, 7), (1, 7), (1, 8), (1, 8), (2, None), (2, 1), (3, 1)):
        pulses.take("a", attempt, beat, 0)
        seen.append(pulses.moved("a"))
    assert seen == [False, False, True, True, False, True, False]
    assert not pulses.moved("b")


Looks = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 50)), max_size=20)


@given(looks=Looks, offset=st.integers(-(10**6), 10**6))
def test_no_clock_but_differences_of_the_observers_own_count(looks: list[tuple[int, int, int]], offset: int) -> None:
    """A clock that is days off judges alike; a counter that was set back is a sign of life too."""
    unshifted, shifted = Pulses(), Pulses()
    now, seen, since = 0, None, 0
    for attempt, beat, pause in looks:
        now += pause
        if seen != (attempt, beat):
            seen, since = (attempt, beat), now
        assert unshifted.take("a", attempt, beat, now) == shifted.take("a", attempt, beat, now + offset) == now - since
