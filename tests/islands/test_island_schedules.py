"""Schedules of islands under faults: nothing is forgotten, and no job idles beside an island beyond the rule."""

from math import inf, nan
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ddm_ray.islands import run_view, worker_heartbeat
from ddm_ray.islands.run_view import RunObserver
from ddm_ray.islands.worker_heartbeat import LEASE_SECONDS
from ddm_ray.jobs import observer, status
from ddm_ray.jobs.job_files import JobFiles
from ddm_ray.jobs.job_status import START_SECONDS
from ddm_ray.run.graph import ROUTER, Artifact, expert
from ddm_ray.run.manifest import NAME
from tests.islands.pretend_islands import Fleet
from tests.islands.simulated import Load

LIES = [inf, nan, 0.0, -1.0, 1e29, 1000.0, 1.0]
# Most islands and experts of a schedule; of the soak's schedules one in eight is large.
SIZES, SOAK_SIZES = [(5, 16)], [(64, 256)] + 7 * [(16, 64)]


class InTurn:
    """A pool without threads, which cost more than requests that nobody answers from afar."""

    def __init__(self, workers: int):
        pass

    def __enter__(self) -> "InTurn":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    map = staticmethod(map)


@pytest.fixture(autouse=True)
def requests_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (observer, worker_heartbeat, status):
        monkeypatch.setattr(module, "ThreadPoolExecutor", InTurn)


Which = st.integers(0, 255)
FAULTS = ["dies", "freezes", "wakes", "comes back", "drained", "dies taking", "dies launching"]
FAULTS += ["no room", "room"]


class Schedule(RuleBasedStateMachine):
    """A run's life on islands: faults in any order, and at the end all is done, each artifact once."""

    sizes = SIZES

    @initialize(
        size=Which, islands=Which, experts=Which, spread=st.sampled_from([1, 4, 16]), seed=st.integers(0, 2**32)
    )
    def begin(self, size: int, islands: int, experts: int, spread: float, seed: int) -> None:
        most_islands, most_experts = self.sizes[size % len(self.sizes)]
        islands, experts = 1 + islands % most_islands, 1 + experts % most_experts
        chance = Random(seed)
        works = {artifact: chance.uniform(100, 900) for artifact in (*map(expert, range(experts)), ROUTER)}
        self.fleet = Fleet(works, [spread ** chance.random() for _ in range(islands)], seed)
        self.first: dict[Artifact, bytes] = {}

    def index(self, which: int) -> int:
        return which % len(self.fleet.islands)

    def artifact(self, which: int) -> Artifact:
        artifacts = list(self.fleet.run.works)
        return artifacts[which % len(artifacts)]

    @rule(ticks=st.integers(1, 40))
    def time_passes(self, ticks: int) -> None:
        self.fleet.advance(ticks)

    @rule(which=Which, fault=st.sampled_from(FAULTS))
    def island(self, which: int, fault: str) -> None:
        index = self.index(which)
        process = self.fleet.processes[index]
        match fault.split():
            case ["dies"]:
                process.gone = True
            case ["dies", when]:
                process.ends = when
            case ["freezes"]:
                process.freeze()
            case ["wakes"]:
                self.fleet.wake(index)
            case ["comes", "back"]:
                self.fleet.restart(index)
            case ["drained"]:
                self.fleet.drain(index)
            case [*without, "room"]:
                self.fleet.islands[index].room = not without

    @rule(which=Which, factor=st.sampled_from([0.5, 1.0, 1.4]))
    def its_speed_changes(self, which: int, factor: float) -> None:
        self.fleet.islands[self.index(which)].speed = self.fleet.speeds[self.index(which)] * factor

    @rule(which=Which, artifact=Which)
    def it_fails_at_one(self, which: int, artifact: int) -> None:
        self.fleet.islands[self.index(which)].cursed.add(self.artifact(artifact))

    @rule(which=Which, first=Which, last=Which)
    def it_comes_back_for_some(self, which: int, first: int, last: int) -> None:
        artifacts = list(self.fleet.run.works)
        only = frozenset(artifacts[first % len(artifacts) : last % len(artifacts) + 1])
        self.fleet.islands[self.index(which)].only = only
        self.fleet.restart(self.index(which))

    @rule(artifact=Which)
    def somebody_trains_by_hand(self, artifact: int) -> None:
        self.fleet.train_by_hand(self.artifact(artifact))

    @rule()
    def those_by_hand_die(self) -> None:
        self.fleet.hands.clear()

    @rule(artifact=Which, again=st.booleans())
    def somebody_stops_one(self, artifact: int, again: bool) -> None:
        (self.fleet.allow if again else self.fleet.stop)(self.artifact(artifact))

    @rule(artifact=Which)
    def its_shard_is_gone(self, artifact: int) -> None:
        self.fleet.lose_shard(self.artifact(artifact))

    @rule()
    def all_shards_are_there(self) -> None:
        self.fleet.run.missing.clear()

    @rule(artifact=Which)
    def a_heartbeat_is_damaged(self, artifact: int) -> None:
        self.fleet.run.damage_heartbeat(self.artifact(artifact))

    @rule(speed=st.sampled_from(LIES))
    def one_that_never_takes(self, speed: float) -> None:
        if len(self.fleet.liars) < 3:
            self.fleet.lie(speed)

    @invariant()
    def the_first_commit_counts(self) -> None:
        if hasattr(self, "first"):
            run = self.fleet.run
            now = {artifact: run.store.read(f"{artifact}/{NAME}") for artifact in run.committed}
            assert self.first.items() <= now.items()
            assert all(training.done >= training.work for training in run.committed.values())
            self.first = now

    def teardown(self) -> None:
        if hasattr(self, "first"):
            self.fleet.calm()
            self.fleet.finish()
            self.the_first_commit_counts()
            assert self.first.keys() == self.fleet.run.works.keys()


def test_nothing_is_forgotten_and_nobody_idles_beyond_the_rule(every: bool) -> None:
    sizes, examples, steps = (SOAK_SIZES, 1000, 40) if every else (SIZES, 20, 25)
    run_state_machine_as_test(
        type("Schedule", (Schedule,), {"sizes": sizes}),
        settings=settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.parametrize("lie", LIES)
def test_islands_finish_beside_one_that_never_takes(lie: float) -> None:
    fleet = Fleet({expert(index): 300.0 for index in range(6)}, [1.0, 2.0], 5)
    fleet.lie(lie)
    fleet.finish()


@pytest.mark.parametrize("without", [1, 2, 3])
def test_islands_without_room_leave_a_job_to_one_that_has_some(without: int) -> None:
    """All are as fast, and those without room come first."""
    fleet = Fleet({expert(index): 300.0 for index in range(2)}, [1.0] * 4, 0)
    for island in fleet.islands[:without]:
        island.room = False
    fleet.finish()


def test_a_start_without_end_would_hold_a_job_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view, "START_SECONDS", inf)
    fleet = Fleet({expert(index): 300.0 for index in range(2)}, [1.0] * 4, 0)
    for island in fleet.islands[1:]:
        island.room = False
    with pytest.raises(AssertionError, match=" idle: "):
        fleet.finish()


def test_a_job_that_was_lost_here_is_taken_again_once_no_other_worker_lives() -> None:
    fleet = Fleet({expert(0): 300.0}, [1.0] * 2, 0)
    fleet.islands[0].room = fleet.islands[1].room = False
    while fleet.run.takes[expert(0)] < 2:
        fleet.advance(1)
        assert fleet.now < 2 * START_SECONDS
    fleet.advance(8)
    holder, other = sorted(fleet.processes, key=lambda each: each.training is None)
    assert holder.training and not other.training
    holder.gone, other.island.room = True, True
    died = fleet.now
    fleet.finish()
    assert fleet.now - died < 300 + START_SECONDS + 4 * LEASE_SECONDS


def test_who_has_no_room_holds_what_a_dead_attempt_damaged_no_longer_than_others() -> None:
    fleet = Fleet({expert(0): 900.0}, [1.0] * 2, 0)
    fleet.train_by_hand(expert(0))
    fleet.advance(20)
    fleet.hands.clear()
    fleet.run.damage_heartbeat(expert(0))
    fleet.islands[0].room = False
    fleet.finish()


def test_a_fast_island_takes_the_last_job_over_and_no_step_is_lost() -> None:
    fleet = Fleet({expert(index): 3000.0 for index in range(2)}, [1.0, 16.0], 5)
    fleet.finish()
    moved = next(training for training in fleet.run.committed.values() if fleet.run.takes[training.artifact] == 2)
    assert fleet.now < 3000 / 4
    assert moved.launch.island == "01" and sum(each.moves for each in fleet.processes) == 1


def test_two_who_want_the_same_are_settled_by_the_take() -> None:
    """Ten islands that begin at once, each alone as far as it sees: all want the first job, one has it."""
    fleet = Fleet({expert(index): 300.0 for index in range(30)}, [1.0] * 10, 5)
    fleet.finish()
    assert fleet.run.lost_takes > 0 and fleet.run.second_commits == 0
    assert sum(fleet.run.takes.values()) == 30 + sum(each.moves for each in fleet.processes)


@pytest.mark.parametrize("spread", [1.0, 16.0])
def test_looks_and_estimates_that_jitter_cost_little(spread: float) -> None:
    """Without faults, where speeds are known from the beginning but differ at each look, and looks have pauses."""
    load = Load(tuple(spread ** (index / 7) for index in range(8)), {expert(index): 3000.0 for index in range(32)})
    fleet = Fleet(load.works, list(load.speeds), 5)
    for process in fleet.processes:
        process.known_speed = process.island.speed
    fleet.finish()
    assert fleet.now < 1.2 * load.lower_bound
    assert spread > 1 or not sum(each.moves for each in fleet.processes)


def a_rough_day() -> None:
    """Seven jobs when four islands come, the last without nodes: the hand-begun is begun twice, one try of which dies.

    One job is stopped, another lacks its shard; and the first island's worker dies.
    """
    fleet = Fleet({expert(index): 1500.0 for index in range(7)}, [1.0, 1.0, 4.0, 4.0], 5)
    for process in fleet.processes:
        process.gone = True
    fleet.islands[3].room = False
    fleet.stop(expert(5))
    fleet.lose_shard(expert(6))
    fleet.train_by_hand(expert(0))
    fleet.advance(20)
    fleet.train_by_hand(expert(0))
    fleet.advance(5)
    fleet.hands.pop()
    fleet.advance(20)
    for index in range(4):
        fleet.restart(index)
    fleet.advance(60)
    first = fleet.processes[0]
    assert first.training
    first.gone = True
    fleet.run.damage_heartbeat(first.training.artifact)
    fleet.advance(60)
    fleet.calm()
    fleet.finish()


def test_a_rough_day_ends_well() -> None:
    a_rough_day()


@pytest.mark.parametrize(
    ("where", "name", "mutant", "why"),
    [
        pytest.param(RunObserver, "_lives", lambda *_: True, "stand by who is dead", id="the dead live"),
        pytest.param(RunObserver, "_holder", lambda *_: "", " takes ", id="nobody holds anything"),
        pytest.param(JobFiles, "stopped", False, "which is stopped", id="requests to stop are unseen"),
        pytest.param(observer, "_doubted", lambda *_: False, " takes ", id="older attempts are unseen"),
        pytest.param(RunObserver, "_lack", lambda *_: "", "which needs", id="nothing is lacking"),
    ],
)
def test_worse_rules_fail(where: object, name: str, mutant: object, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, mutant)
    with pytest.raises(AssertionError, match=why):
        a_rough_day()
