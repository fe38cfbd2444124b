"""The rule by example and by property, and makespans under it beside those of rules that are worse."""

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.islands.choose import Choice, OpenJob, Worker, choose
from ddm_ray.storage.graph import Artifact, expert
from tests.islands.simulated import Load, Rule, longest_first, ratios, require_rule, without_rests

SPREADS = (1.0, 4.0, 8.0, 16.0)
# Of 400 loads up to 64 islands the rule takes at most 1.087 of the bound at equal speeds, 1.051 at 1 to 4. Of 40, held
# against a weaker bound (1.14, 1.11, 1.05, 1.02, 1.04 for the rule at speeds 1 to 1, 2, 4, 8, 16): the longest first to
# whoever is free 1.14, 1.74, 2.83, 6.69, 15.6, where a slow island gets a monolith; the rule without what is left of
# the jobs that run 1.14, 1.76, 1.49, 1.43, 1.23.
MOST_RATIO = 1.2


def job(number: int, work: float = 600.0, owner: str = "", obstacle: str = "") -> OpenJob:
    return OpenJob(expert(number), work, owner, obstacle)


SLOW, FAST = Worker("slow", 1.0), Worker("fast", 4.0)
NEVER = frozenset({"experts/000"})


@pytest.mark.parametrize(
    ("jobs", "workers", "me", "take", "reason"),
    [
        pytest.param([], [SLOW], "slow", None, "there is nothing to take", id="nothing"),
        pytest.param([job(1), job(0)], [SLOW], "slow", 0, "", id="of equal work the first"),
        pytest.param([job(0), job(1, 700)], [SLOW], "slow", 1, "", id="the most work first"),
        pytest.param([job(0), job(1)], [FAST, SLOW], "fast", 0, "", id="the fastest takes the first"),
        pytest.param(
            [job(0), job(1)],
            [FAST, SLOW],
            "slow",
            None,
            "experts/000 is sooner done by fast, in 150 s; experts/001 is sooner done by fast, in 300 s",
            id="a fast one that is idle does both sooner",
        ),
        pytest.param(
            [job(number) for number in range(5)],
            [FAST, SLOW],
            "slow",
            4,
            "",
            id="the fifth: of a tie the first by id has it",
        ),
        pytest.param(
            [job(0), job(1, 1000, "fast")],
            [FAST, SLOW],
            "slow",
            None,
            "experts/000 is sooner done by fast, in 400 s; experts/001 is trained by fast, 250 s left",
            id="a fast one that is busy does it sooner",
        ),
        pytest.param([job(0), job(1, 2000, "fast")], [FAST, SLOW], "slow", 0, "", id="unless it is busy for long"),
        pytest.param(
            [job(0, 600, "slow"), job(1)], [FAST, SLOW], "slow", None, "slow trains experts/000", id="one at a time"
        ),
        pytest.param(
            [job(0, 600, "by hand"), job(1, obstacle="its shard is missing")],
            [SLOW],
            "slow",
            None,
            "experts/000 is trained by by hand; experts/001: its shard is missing",
            id="nothing is free",
        ),
        pytest.param(
            [job(0)],
            [replace(FAST, failed=NEVER), replace(SLOW, only=frozenset())],
            "slow",
            None,
            "experts/000 may be taken by nobody who is here",
            id="nobody may",
        ),
        pytest.param([job(0)], [replace(FAST, failed=NEVER), SLOW], "slow", 0, "", id="whom it failed waits for none"),
        pytest.param(
            [job(0)],
            [FAST, replace(SLOW, only=frozenset({"router"}))],
            "slow",
            None,
            "experts/000 is left to fast, in 150 s",
            id="it may not",
        ),
        pytest.param(
            [job(0), job(1, 1)], [FAST, replace(SLOW, only=frozenset({"experts/001"}))], "slow", 1, "", id="it may one"
        ),
        pytest.param([job(0)], [Worker("a", None), Worker("b", None)], "a", 0, "", id="ties by id"),
        pytest.param(
            [job(0)],
            [Worker("a", None), Worker("b", None)],
            "b",
            None,
            "experts/000 is sooner done by a",
            id="no time is told of a speed that isn't known",
        ),
        pytest.param([job(0)], [Worker("a", None), SLOW, FAST], "fast", 0, "", id="unknown: as the slower of two"),
        pytest.param(
            [job(number, owner="north") for number in range(6)],
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
    choice = choose(jobs, workers, me)
    assert choice.take == (None if take is None else expert(take))
    assert reason is None or choice.reason == reason


def test_it_says_whom_it_expects_to_take_what_and_when() -> None:
    jobs = [job(0, 1000, "fast"), job(1), job(2, 300)]
    assert choose(jobs, [FAST, SLOW], "slow").take == expert(2)
    barred = replace(SLOW, failed=frozenset({"experts/002"}))
    assert choose(jobs, [FAST, barred], "slow").expects == {"fast": (expert(1), 250.0)}
    assert choose(jobs[1:], [FAST, barred], "slow").expects == {"fast": (expert(1), 0.0)}


def test_who_is_none_of_the_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="north is none of the workers"):
        choose([job(0)], [SLOW], "north")


Speeds = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, -1.0, inf, nan, 5e-324, 1e308, 1.0, 2.0, 16.0]))
Works = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, inf, nan, 1.0, 100.0]), st.floats(1, 1000))
Names = st.frozensets(st.sampled_from([f"experts/{number:03d}" for number in range(8)]))
Crews = st.lists(st.tuples(Speeds, st.one_of(st.none(), Names), Names), min_size=1, max_size=7).map(
    lambda rows: [Worker(f"{index}/0000", *row) for index, row in enumerate(rows)]
)
Jobs = st.lists(
    st.tuples(
        Works, st.sampled_from(["", "", "", "0/0000", "2/0000", "somebody"]), st.sampled_from(["", "", "stopped"])
    ),
    max_size=8,
).map(lambda rows: [OpenJob(expert(index), *row) for index, row in enumerate(rows)])


@settings(max_examples=100)
@given(jobs=Jobs, workers=Crews, seed=st.integers())
def test_any_view_gives_one_plan_which_never_forgets_a_job(
    jobs: list[OpenJob], workers: list[Worker], seed: int
) -> None:
    """Speeds and works of any value. Who is idle takes or waits by the rule; all take different jobs.

    Where no worker is busy and a job is free that somebody may take, somebody takes one: nobody waits for ever.
    """
    choices = {worker.id: choose(jobs, workers, worker.id) for worker in workers}
    chance = random.Random(seed)
    for worker in workers:
        require_rule(jobs, workers, worker.id, choices[worker.id])
        shuffled = choose(chance.sample(jobs, len(jobs)), chance.sample(workers, len(workers)), worker.id)
        assert shuffled == choices[worker.id]
    taken = [choice.take for choice in choices.values() if choice.take]
    assert len(taken) == len(set(taken))
    free = frozenset(job.artifact for job in jobs if job.free)
    owners = {job.owner for job in jobs}
    if not any(worker.id in owners for worker in workers):
        assert bool(taken) == any(free - worker.barred(free) for worker in workers)


@given(jobs=Jobs, speed=Speeds)
def test_who_is_alone_takes_what_it_may(jobs: list[OpenJob], speed: float | None) -> None:
    free = [job.artifact for job in jobs if job.free]
    taken = choose(jobs, [Worker("alone", speed)], "alone").take
    assert taken in free if free else taken is None


@pytest.mark.parametrize("liar", [inf, nan, 0.0, -1.0, 5e-324, 1e308, None])
def test_a_speed_that_cannot_be_counts_as_the_usual_one(liar: float | None) -> None:
    """Of three like it: two jobs go to the faster ones, the third to whoever names none."""
    workers = [Worker("a", liar), Worker("b", 2.0), Worker("c", 2.0)]
    takes = [choose([job(0), job(1), job(2)], workers, worker.id).take for worker in workers]
    assert takes == [expert(0), expert(1), expert(2)]


@settings(max_examples=60)
@given(speeds=st.lists(st.floats(1, 16), min_size=1, max_size=8), each=st.integers(3, 6), more=st.integers(0, 7))
def test_experts_that_cost_the_same_are_done_as_soon_as_can_be(speeds: list[float], each: int, more: int) -> None:
    experts = range(each * len(speeds) + more)
    load = Load(tuple(speeds), {expert(index): 100.0 for index in experts})
    assert load.makespan(choose) == pytest.approx(load.lower_bound, rel=1e-9)


@settings(max_examples=15)
@given(islands=st.integers(1, 12), each=st.integers(3, 8), spread=st.sampled_from(SPREADS), seed=st.integers(0, 2**32))
def test_no_load_takes_a_fifth_longer_than_it_must(islands: int, each: int, spread: float, seed: int) -> None:
    load = Load.of(islands, islands * each, spread, seed)
    assert load.makespan(choose) <= MOST_RATIO * load.lower_bound


@pytest.mark.parametrize("spread", SPREADS)
def test_unequal_islands_finish_within_the_bound(spread: float, request: pytest.FixtureRequest) -> None:
    loads, most = (400, 64) if request.config.getoption("--every-call") else (12, 20)
    worst = max(ratios(spread, loads, most, choose))
    print(f"speeds 1 to {spread:g}: makespan at most {worst:.3f} of the bound over {loads} loads up to {most} islands")
    assert worst <= MOST_RATIO


@pytest.mark.parametrize(("rule", "spread"), [(longest_first, 16.0), (without_rests, 2.0)])
def test_worse_rules_miss_the_bound(rule: Rule, spread: float) -> None:
    assert max(ratios(spread, 12, 20, rule)) > 1.3
    assert max(ratios(spread, 12, 20, choose)) <= MOST_RATIO


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


def test_a_control_that_waits_for_nobody_fails_the_rule() -> None:
    jobs: list[OpenJob] = [job(0), job(1, 1000, "fast")]
    assert longest_first(jobs, [FAST, SLOW], "slow") == Choice(Artifact("experts/000"))
    with pytest.raises(AssertionError):
        require_rule(jobs, [FAST, SLOW], "slow", longest_first(jobs, [FAST, SLOW], "slow"))
