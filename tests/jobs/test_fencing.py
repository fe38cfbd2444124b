"""Which newer attempt has taken an attempt's place: one with a committed state, or one that is seen alive."""

from collections import Counter
from functools import partial
from itertools import count

import pytest

from ddm_ray.errors import Superseded, TrainingError
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.jobs.fencing import Fence, require_standing
from ddm_ray.jobs.launches import Launch
from ddm_ray.run.graph import Artifact
from ddm_ray.store.store import Store
from tests.jobs.attempts import beat, fail, save

JOB = Artifact("experts/001")


@pytest.fixture
def store() -> Store:
    return Store("memory:///")


def number_of(fence: Fence) -> int | None:
    successor = fence.look()
    return successor and successor.number


def test_an_attempt_without_a_newer_one_costs_a_request_a_look(store: Store, requests: Counter[str]) -> None:
    old = claim(store, JOB)
    save(old, 10)
    beat(old, 1, 10)
    fence = Fence(claim(store, JOB))
    requests.clear()
    assert [fence.look() for _ in range(3)] == [None] * 3
    assert requests == {"head": 3}


def test_a_committed_state_takes_over_at_the_first_look(store: Store) -> None:
    fence, newer = Fence(claim(store, JOB)), claim(store, JOB)
    store.write(f"{newer.state_prefix(5)}/rank-000/value.safetensors", b"being written")
    assert number_of(fence) is None
    save(newer, 5)
    assert number_of(fence) == 2
    fail(newer, "its loss isn't finite", final=True)
    assert number_of(fence) == 2, "whoever begins next goes on from its state"


def test_one_that_lives_takes_over_at_the_second_look(store: Store) -> None:
    fence, newer = Fence(claim(store, JOB)), claim(store, JOB)
    assert number_of(fence) is None
    beat(newer, 1, 0)
    assert number_of(fence) is None, "a first heartbeat may be its last"
    assert number_of(fence) is None, "the same heartbeat is no sign of life"
    beat(newer, 2, 0)
    beat(newer, 3, 1, phase="compiling")
    assert number_of(fence) is None, "what trains nothing yet beats by itself"
    beat(newer, 4, 1)
    assert number_of(fence) == 2


@pytest.mark.parametrize("end", ["silent", "failed", "damaged"])
def test_one_that_came_to_nothing_takes_nobodys_place(store: Store, end: str) -> None:
    fence, newer = Fence(claim(store, JOB)), claim(store, JOB)
    for number in range(1, 5):
        if end == "failed":
            beat(newer, number, 0)
            fail(newer, "no GPU")
        elif end == "damaged":
            store.write(f"{newer.prefix}/HEARTBEAT", b"{" * number)
        assert number_of(fence) is None


def test_the_newest_that_goes_on_is_named_as_its_claim_says(store: Store) -> None:
    fence = Fence(claim(store, JOB))
    for island in ("south", "north", "west"):
        attempt = claim(store, JOB, {"launch": island, "island": island, "job": "raysubmit_7"})
        if island != "west":
            save(attempt, 5)
    successor = fence.look()
    assert successor and successor.number == 3
    error = successor.error(1, "mine", 268)
    host = Attempt(store, JOB, 3).claim()["host"]
    assert str(error) == (
        f"attempt 1 ends after step 268: attempt 3 on island north, host {host}, job raysubmit_7 has overtaken it;"
        " leave the job to that one"
    )
    assert not vars(error)["by_its_own_launch"]
    for launch, own in (("north", True), ("west", True), ("south", True), (None, False)):
        assert vars(successor.error(1, launch))["by_its_own_launch"] is own


@pytest.mark.parametrize("end", ["failed", "silent"])
def test_one_that_saved_a_state_and_ended_leaves_the_job_to_the_next_attempt(store: Store, end: str) -> None:
    begun(store, launch := Launch(JOB))
    hours = partial(next, count(0.0, 3600.0))
    fence, newer = Fence(Attempt(store, JOB, 1), hours), claim(store, JOB, Launch(JOB).claim_fields())
    beat(newer, 1, 5)
    save(newer, 5)
    if end == "failed":
        fail(newer, "no GPU")
    else:
        assert (successor := fence.look()) and successor.lives is None
    successor = fence.look()
    assert successor and successor.lives is False
    error = successor.error(1, launch.id)
    assert error.passes and "trains on" not in str(error)
    require_standing(store, launch, hours, sleep=lambda _: None)


def test_one_of_slow_steps_is_not_taken_for_dead(store: Store) -> None:
    now = [0.0]
    fence, newer = Fence(claim(store, JOB), lambda: now[0]), claim(store, JOB)
    save(newer, 5)
    beat(newer, 1, 5, steps_per_second=0.02)
    lives = []
    for now[0] in (0.0, 20.0, 140.0, 160.0):
        successor = fence.look()
        assert successor
        lives.append(successor.lives)
    assert lives == [None, None, None, False]


def test_one_that_saved_a_state_and_beats_trains_on(store: Store) -> None:
    begun(store, launch := Launch(JOB))
    newer = claim(store, JOB, Launch(JOB).claim_fields())
    save(newer, 5)
    with pytest.raises(Superseded, match="trains on"):
        require_standing(store, launch, sleep=lambda _: beat(newer, 1, 5))


def begun(store: Store, launch: Launch, saved: bool = False) -> None:
    attempt = claim(store, JOB, launch.claim_fields())
    if saved:
        save(attempt, 5)


def test_a_launch_begins_no_attempt_over_one_that_took_its_place(store: Store) -> None:
    begun(store, Launch(JOB), saved=True)
    first = Launch(JOB, after=1)
    require_standing(store, first)
    begun(store, first)
    require_standing(store, first)
    begun(store, second := Launch(JOB, after=2, island="north"))
    require_standing(store, first)
    begun(store, second, saved=True)
    newest = Attempt(store, JOB, 4)
    with pytest.raises(Superseded, match=r"attempt 2: attempt 4 on island north, .* has overtaken it"):
        require_standing(store, first, sleep=lambda _: beat(newest, 1, 5))
    require_standing(store, second)
    require_standing(store, Launch(JOB, after=4))


def test_a_launch_reads_no_claims_from_before_it(store: Store, requests: Counter[str]) -> None:
    for _ in range(5):
        begun(store, Launch(JOB))
    requests.clear()
    require_standing(store, Launch(JOB, after=5))
    assert requests == {"get": 1, "list": 1}


def test_a_launch_that_has_given_up_begins_no_attempt(store: Store) -> None:
    launch = Launch(JOB)
    launch.give_up(store, TrainingError("three times in a row"))
    with pytest.raises(TrainingError, match="three times in a row"):
        require_standing(store, launch)
    require_standing(store, Launch(JOB))
