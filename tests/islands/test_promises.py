"""Schedules of islands under faults: nothing is forgotten, and nobody waits for ever for one that never takes."""

from collections.abc import Sequence
from math import inf, nan

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ddm_ray.islands import promises
from ddm_ray.islands.choose import Choice, OpenJob, Worker, choose
from ddm_ray.islands.promises import Promises
from ddm_ray.storage.graph import ROUTER, Artifact, expert
from tests.islands.pretend_islands import GRACE, Attempt, Fleet, Process
from tests.islands.simulated import Load, require_rule

SLOW, FAST = Worker("slow", 1.0), Worker("fast", 4.0)
LIES = [inf, nan, 0.0, -1.0, 1e29, 1000.0, 1.0]
# Most islands and experts of a schedule; of the soak's schedules one in eight is large.
SIZES, SOAK_SIZES = [(5, 16)], [(64, 256)] + 7 * [(16, 64)]
EVERY_CALL, THIS_MANY = 2000, 8
waits = [0, 0]


def job(number: int, work: float = 600.0, owner: str = "") -> OpenJob:
    return OpenJob(expert(number), work, owner)


def test_one_that_is_idle_and_never_takes_is_left_out_after_the_time_of_grace() -> None:
    jobs, slow = [job(0)], Promises(GRACE)
    takes = [slow.choose(jobs, [SLOW, FAST], "slow", now).take for now in (-1e5, 60 - 1e5, 61 - 1e5, 75 - 1e5)]
    assert takes == [None, None, expert(0), expert(0)]
    fast = Promises(GRACE)
    assert [fast.choose(jobs, [SLOW, FAST], "fast", now).take for now in (0, 1000)] == [expert(0)] * 2


def test_one_that_is_busy_has_twice_the_time_it_should_need() -> None:
    jobs, slow = [job(0), job(1, 1000, "fast")], Promises(GRACE)
    takes = [slow.choose(jobs, [SLOW, FAST], "slow", now).take for now in (0, 2 * 250 + 60, 2 * 250 + 61)]
    assert takes == [None, None, expert(0)]


def test_one_that_takes_something_is_counted_on_again() -> None:
    slow = Promises(GRACE)
    for now in (0, 100):
        slow.choose([job(0), job(1)], [SLOW, FAST], "slow", now)
    taken = [job(0), job(1, 600, "fast")]
    assert [slow.choose(taken, [SLOW, FAST], "slow", now).take for now in (101, 160)] == [None, None]


def test_one_that_was_late_for_a_job_that_is_gone_is_counted_on_again() -> None:
    slow = Promises(GRACE)
    assert [slow.choose([job(0)], [SLOW, FAST], "slow", now).take for now in (0, 100)] == [None, expert(0)]
    assert slow.choose([job(1)], [SLOW, FAST], "slow", 101).take is None


def checked(jobs: Sequence[OpenJob], workers: Sequence[Worker], me: str) -> Choice:
    """The product's choice, held against the rule; of large views some."""
    choice = choose(jobs, workers, me)
    waits[choice.take is None] += 1
    if len(jobs) * len(workers) < EVERY_CALL or not sum(waits) % THIS_MANY:
        require_rule(jobs, workers, me, choice)
    return choice


@pytest.fixture(autouse=True)
def hold_against_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "choose", checked)


Which = st.integers(0, 255)


class Schedule(RuleBasedStateMachine):
    """A run's life on islands: faults in any order, and at the end all is done, each artifact once."""

    sizes = SIZES

    @initialize(
        size=Which, islands=Which, experts=Which, spread=st.sampled_from([1, 4, 16]), seed=st.integers(0, 2**32)
    )
    def begin(self, size: int, islands: int, experts: int, spread: float, seed: int) -> None:
        most_islands, most_experts = self.sizes[size % len(self.sizes)]
        islands, experts = 1 + islands % most_islands, 1 + experts % most_experts
        self.fleet = Fleet({}, [1.0] * islands, seed)
        chance = self.fleet.chance
        works = {artifact: chance.uniform(100, 900) for artifact in (*map(expert, range(experts)), ROUTER)}
        self.fleet = Fleet(works, [spread ** chance.random() for _ in range(islands)], seed)
        self.first: dict[Artifact, Attempt] = {}

    def process(self, which: int) -> Process:
        return self.fleet.processes[which % len(self.fleet.processes)]

    def artifact(self, which: int) -> Artifact:
        artifacts = list(self.fleet.bucket.works)
        return artifacts[which % len(artifacts)]

    @rule(ticks=st.integers(1, 40))
    def time_passes(self, ticks: int) -> None:
        self.fleet.advance(ticks)

    @rule(which=Which, fault=st.sampled_from(["dies", "freezes", "wakes", "comes back", "drained", "dies taking"]))
    def island(self, which: int, fault: str) -> None:
        process = self.process(which)
        if fault == "comes back":
            self.fleet.restart(which % len(self.fleet.processes))
        elif fault == "drained":
            process.leave()
        elif fault == "dies taking":
            process.ends = "taking"
        else:
            process.gone, process.frozen = process.gone or fault == "dies", fault == "freezes"

    @rule(which=Which, factor=st.sampled_from([0.3, 1.0, 3.0]))
    def its_speed_changes(self, which: int, factor: float) -> None:
        self.process(which).speed = self.fleet.speeds[which % len(self.fleet.speeds)] * factor

    @rule(which=Which, artifact=Which)
    def it_fails_at_one(self, which: int, artifact: int) -> None:
        self.fleet.cursed[which % len(self.fleet.cursed)].add(self.artifact(artifact))

    @rule(which=Which, first=Which, last=Which)
    def it_comes_back_for_some(self, which: int, first: int, last: int) -> None:
        island, artifacts = which % len(self.fleet.only), list(self.fleet.bucket.works)
        self.fleet.only[island] = frozenset(artifacts[first % len(artifacts) : last % len(artifacts) + 1])
        self.fleet.restart(island)

    @rule(artifact=Which)
    def somebody_trains_by_hand(self, artifact: int) -> None:
        self.fleet.train_by_hand(self.artifact(artifact))

    @rule()
    def those_by_hand_die(self) -> None:
        self.fleet.hands.clear()

    @rule(speed=st.sampled_from(LIES))
    def one_that_never_takes(self, speed: float) -> None:
        if len(self.fleet.liars) < 3:
            self.fleet.lie(speed)

    @invariant()
    def the_first_commit_counts(self) -> None:
        if hasattr(self, "first"):
            committed = self.fleet.bucket.committed
            assert self.first == {artifact: committed[artifact] for artifact in self.first}
            assert all(attempt.done >= self.fleet.bucket.works[artifact] for artifact, attempt in committed.items())
            self.first = dict(committed)

    def teardown(self) -> None:
        if hasattr(self, "first"):
            self.fleet.calm()
            self.fleet.finish()
            self.the_first_commit_counts()
            assert self.fleet.bucket.commits == len(self.fleet.bucket.works)


def test_nothing_is_forgotten_and_nobody_idles_beyond_the_rule(request: pytest.FixtureRequest) -> None:
    every = request.config.getoption("--every-call")
    sizes, examples, steps = (SOAK_SIZES, 1000, 40) if every else (SIZES, 20, 25)
    waits[:] = 0, 0
    run_state_machine_as_test(
        type("Schedule", (Schedule,), {"sizes": sizes}),
        settings=settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck)),
    )
    print(f"{examples} schedules, {waits[0]} takes, {waits[1]} waits")
    assert min(waits) > 50


@pytest.mark.parametrize("lie", LIES)
def test_islands_finish_beside_one_that_never_takes(lie: float) -> None:
    fleet = Fleet({expert(index): 300.0 for index in range(6)}, [1.0, 2.0], 5)
    fleet.lie(lie)
    fleet.finish()


def test_without_promises_they_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet({expert(index): 300.0 for index in range(6)}, [1.0, 2.0], 5)
    for process in fleet.processes:
        process.promises = Promises(inf)
    fleet.lie(1000.0)
    with pytest.raises(AssertionError, match="nothing moves"):
        fleet.finish()


def test_two_who_want_the_same_are_settled_by_the_take() -> None:
    """Ten islands that begin at once, each alone as far as it sees: all want the first job, one has it."""
    fleet = Fleet({expert(index): 300.0 for index in range(30)}, [1.0] * 10, 5)
    fleet.finish()
    assert fleet.bucket.lost_takes > 0 and fleet.bucket.second_commits == 0
    assert sum(map(len, fleet.bucket.takes.values())) == 30


@pytest.mark.parametrize("spread", [1.0, 16.0])
def test_looks_and_estimates_that_jitter_cost_little(spread: float) -> None:
    """Without faults, where speeds are known from the beginning but differ at each look, and looks have pauses."""
    load = Load(tuple(spread ** (index / 7) for index in range(8)), {expert(index): 3000.0 for index in range(32)})
    fleet = Fleet(load.works, list(load.speeds), 5)
    for process in fleet.processes:
        process.known_speed = process.speed
    fleet.finish()
    assert fleet.now < 1.2 * load.lower_bound
