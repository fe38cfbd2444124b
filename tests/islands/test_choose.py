"""The rule by example and by property, and makespans under it beside those of rules that are worse."""

import random
from collections.abc import Sequence
from math import inf, nan
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.islands import choose as rule
from ddm_ray.islands.choose import MOVE_SECONDS, SOONER, OpenJob, Worker, choose
from ddm_ray.run.graph import expert
from tests.islands.simulated import Load, ratios, take_alone

SPREADS = (1.0, 4.0, 8.0, 16.0)
# Of 40 loads up to 40 islands the rule takes 1.01, 1.02, 1.02 and 1.03 of the bound on average at these spreads, and
# 1.07, 1.42, 1.23 and 1.39 at most, and of 400 loads of 1 to 4 jobs an island 1.65; without take-overs 1.07, 2.6, 3.1
# and 13.1 at most, where a slow island has a monolith.
MAX_MEAN, MAX_RATIO = 1.1, 1.65
SLOW, FAST = Worker("slow", 1.0), Worker("fast", 4.0)
NONE: frozenset[str] = frozenset()
NEVER = frozenset({expert(0)})


def job(number: int, work: float = 600.0, holder: str = "", left: float | None = None, obstacle: str = "") -> OpenJob:
    return OpenJob(expert(number), work, holder, left, obstacle)


@pytest.mark.parametrize(
    ("jobs", "workers", "me", "take", "reason"),
    [
        pytest.param([], [SLOW], "slow", None, "there is nothing to take", id="nothing"),
        pytest.param([job(1), job(0)], [SLOW], "slow", 0, "", id="of equal work the first"),
        pytest.param([job(0), job(1, 700)], [SLOW], "slow", 1, "", id="the most work first"),
        pytest.param([job(0), job(1)], [FAST, SLOW], "slow", 0, "", id="it leaves nothing to faster ones"),
        pytest.param([job(0, 1e6, "slow"), job(1, 1)], [FAST, SLOW], "fast", 1, "", id="what is free comes first"),
        pytest.param([job(0, 1e6, "slow")], [FAST, SLOW], "fast", 0, "", id="a slow holder's is taken over"),
        pytest.param(
            [job(0, 5e5, "slow"), job(1, 1e6, "slower")],
            [FAST, SLOW, Worker("slower", 1.0)],
            "fast",
            1,
            "",
            id="the one that would end last",
        ),
        pytest.param(
            [job(0, 1e6, "slow", 90.0)],
            [FAST, SLOW],
            "fast",
            None,
            "experts/000 is trained by slow",
            id="what is nearly done isn't worth the move",
        ),
        pytest.param([job(0, 1.0, "slow", 1e6)], [FAST, SLOW], "fast", 0, "", id="a slow pace counts, not the work"),
        pytest.param(
            [job(0, 1e6, "fast")],
            [FAST, SLOW],
            "slow",
            None,
            "experts/000 is trained by fast",
            id="not by a slower one",
        ),
        pytest.param(
            [job(0, 1e6, "a")], [Worker("a", 1.0), Worker("b", 1.2)], "b", None, None, id="nor by one a bit faster"
        ),
        pytest.param([job(0, 1e6, "a")], [Worker("a", 1.0), Worker("b", 1.4)], "b", 0, "", id="by one a third faster"),
        pytest.param([job(0, 1e6, "a")], [Worker("a", 1.0), Worker("b", None)], "b", None, None, id="nor an unknown"),
        pytest.param(
            [job(0, 1e6, "a"), job(1, 1e6, "slow")],
            [Worker("a", None), SLOW, FAST],
            "fast",
            0,
            "",
            id="unknown: as the slower of two",
        ),
        pytest.param(
            [job(0, 1e6, "attempt 1"), job(1, obstacle="its shard is missing")],
            [FAST],
            "fast",
            None,
            "experts/000 is trained by attempt 1; experts/001: its shard is missing",
            id="what a command began is its own",
        ),
        pytest.param(
            [job(number, owner, "north") for number, owner in enumerate(range(6, 0, -1))],
            [SLOW],
            "slow",
            None,
            "; ".join([*(f"experts/00{number} is trained by north" for number in range(4)), "and 2 more"]),
            id="no more than four reasons",
        ),
    ],
)
def test_a_worker_takes_or_says_what_it_waits_for(
    jobs: list[OpenJob], workers: list[Worker], me: str, take: int | None, reason: str | None
) -> None:
    choice = choose(jobs, workers, me, NONE)
    assert (choice.take and choice.take.artifact) == (None if take is None else expert(take))
    assert reason is None or choice.reason == reason


def test_what_failed_here_is_left_to_others() -> None:
    assert choose([job(0)], [SLOW], "slow", NEVER).reason == "experts/000 is left to others"
    assert choose([job(0, 1e6, "slow")], [FAST, SLOW], "fast", NEVER).take is None
    assert choose([job(0), job(1)], [SLOW], "slow", NEVER).take == job(1)


def test_who_is_none_of_the_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="north is none of the workers"):
        choose([job(0)], [SLOW], "north", NONE)


Speeds = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, -1.0, inf, nan, 5e-324, 1e308, 1.0, 2.0, 16.0]))
Works = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, inf, nan, 1.0, 100.0]), st.floats(1, 1e6))
Crews = st.lists(Speeds, min_size=1, max_size=7).map(
    lambda speeds: [Worker(f"{index}/0000", speed) for index, speed in enumerate(speeds)]
)
Jobs = st.lists(
    st.tuples(
        Works,
        st.sampled_from(["", "", "", "0/0000", "2/0000", "somebody"]),
        st.one_of(st.none(), st.floats(), st.floats(0, 1e6)),
        st.sampled_from(["", "", "stopped"]),
    ),
    max_size=8,
).map(lambda rows: [OpenJob(expert(index), *row) for index, row in enumerate(rows)])


@settings(max_examples=200)
@given(jobs=Jobs, workers=Crews, seed=st.integers())
def test_any_view_gives_a_choice_which_never_forgets_a_free_job(
    jobs: list[OpenJob], workers: list[Worker], seed: int
) -> None:
    """Speeds, works and times of any value. What is taken over is another worker's, and none is taken for nothing."""
    chance = random.Random(seed)
    free = [job for job in jobs if job.free]
    ids = {worker.id for worker in workers}
    for worker in workers:
        choice = choose(jobs, workers, worker.id, NONE)
        shuffled = chance.sample(jobs, len(jobs)), chance.sample(workers, len(workers))
        # nan is no equal of itself.
        assert repr(choose(*shuffled, worker.id, NONE)) == repr(choice)
        assert (choice.take is None) == bool(choice.reason)
        if free:
            assert any(choice.take is each for each in free)
        elif choice.take:
            assert choice.take.holder in ids - {worker.id} and not choice.take.obstacle


@given(left=st.floats(1, 1e9), mine=st.floats(0.01, 100), other=st.floats(0.01, 100))
def test_two_never_take_a_job_from_each_other_in_turn(left: float, mine: float, other: float) -> None:
    """Where one would be sooner than the other, the other wouldn't, at once or later."""
    workers = [Worker("a", mine), Worker("b", other)]
    if choose([job(0, 1.0, "b", left)], workers, "a", NONE).take:
        after = left * other / mine
        assert SOONER * (MOVE_SECONDS + after) < left
        for share in (1.0, 0.5, 0.01):
            assert choose([job(0, 1.0, "a", share * after)], workers, "b", NONE).take is None


@pytest.mark.parametrize("liar", [inf, nan, 0.0, -1.0, 5e-324, 1e308, None])
def test_a_speed_that_cannot_be_counts_as_the_usual_one(liar: float | None) -> None:
    workers = [Worker("a", liar), Worker("b", 2.0), Worker("c", 2.0), Worker("d", 4.0)]
    assert choose([job(0, 1e6, "a")], workers, "b", NONE).take is None
    assert choose([job(0, 1e6, "b")], workers, "a", NONE).take is None
    assert choose([job(0, 1e6, "a")], workers, "d", NONE).take


@settings(max_examples=15)
@given(islands=st.integers(1, 12), each=st.integers(3, 8), spread=st.sampled_from(SPREADS), seed=st.integers(0, 2**32))
def test_no_load_takes_two_thirds_longer_than_it_must(islands: int, each: int, spread: float, seed: int) -> None:
    load = Load.of(islands, islands * each, spread, seed)
    assert load.makespan(choose) <= MAX_RATIO * load.lower_bound
    assert load.moves <= 3 * islands


@pytest.mark.parametrize("spread", SPREADS)
def test_unequal_islands_finish_within_the_bound(spread: float, every: bool) -> None:
    loads, most = (400, 64) if every else (12, 20)
    quotients = ratios(spread, loads, most, choose)
    print(
        f"speeds 1 to {spread:g}: {mean(quotients):.3f} of the bound, at most {max(quotients):.3f}, over {loads} loads"
    )
    assert mean(quotients) <= MAX_MEAN and max(quotients) <= MAX_RATIO


@pytest.mark.parametrize("sooner", [2.0, inf])
def test_worse_rules_miss_the_bound(sooner: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "SOONER", sooner)
    assert max(ratios(2.0, 40, 40, choose)) > MAX_RATIO


def test_without_take_overs_a_slow_island_has_the_monolith() -> None:
    assert max(ratios(16.0, 12, 20, take_alone)) > 2


def test_equal_islands_take_nothing_over() -> None:
    load = Load.of(8, 30, 1.0, 4)
    load.makespan(choose)
    assert load.moves == 0


def test_the_bound_is_the_best_schedule_of_small_loads() -> None:
    """None of all schedules of six jobs on three islands is shorter than the bound."""
    chance = random.Random(3)
    for _ in range(10):
        works = {expert(index): chance.uniform(1, 100) for index in range(6)}
        load = Load(tuple(chance.uniform(1, 16) for _ in range(3)), works)
        assert load.lower_bound <= best_makespan(load.speeds, list(works.values())) * (1 + 1e-12)


def best_makespan(speeds: Sequence[float], works: list[float], rests: tuple[float, ...] = ()) -> float:
    """By trying all."""
    rests = rests or (0.0,) * len(speeds)
    if not works:
        return max(rest / speed for rest, speed in zip(rests, speeds, strict=True))
    return min(
        best_makespan(speeds, works[1:], (*rests[:index], rests[index] + works[0], *rests[index + 1 :]))
        for index in range(len(speeds))
    )
