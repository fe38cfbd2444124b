"""Engines that take turns: deadlines, what swaps cost, nobody starves; a plain class on a clock of the tests' own."""

import contextlib
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.serve.scheduler import Job, OverloadedError, Speed
from ddm_ray.serve.turns import MIXING, Decision, SharedScheduler, Turns

A_ROW = 0.01
"""Seconds that a row of a velocity takes."""
MAX_ROWS = 4


def learnt(each: float) -> Speed:
    """A speed without a cost of its own for each velocity: how jobs share batches then doesn't matter."""
    speed = Speed()
    for _ in range(50):
        for rows in (1, 8):
            speed.ran(rows, rows * each)
    return speed


@dataclass
class Machine:
    """Engines of `num_experts` and one that mixes; copies take `swap` seconds, beside computing or (`alone`) not."""

    num_experts: int
    places: int
    swap: float
    alone: bool = False
    share: float = 0.25
    now: float = 0.0
    here: list[int] = field(default_factory=list)
    coming: int | None = None
    ready: float = 0.0
    swaps: int = 0
    computed: float = 0.0
    runs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = Turns(self.num_experts, self.places, self.share)
        for _ in range(50):
            self.turns.swapped(self.swap)
        self.schedulers = {
            expert: SharedScheduler(self.turns, MAX_ROWS, margin=1.0) for expert in range(self.num_experts)
        }
        for scheduler in self.schedulers.values():
            scheduler.speed = learnt(A_ROW)
        self.a_mixed_row = A_ROW + self.num_experts * self.swap / MAX_ROWS
        self.schedulers[MIXING] = SharedScheduler(self.turns, MAX_ROWS, self.places, margin=1.0)
        self.schedulers[MIXING].speed = learnt(self.a_mixed_row)

    @property
    def jobs(self) -> list[Job]:
        return [job for scheduler in self.schedulers.values() for job in scheduler.jobs]

    def turn(self) -> Decision:
        """Run one velocity as the engines do; those whose last it was, have gone."""
        if self.coming is not None and self.ready <= self.now:
            self.here.append(self.coming)
            self.coming = None
        deadlines = {number: own.jobs[0].deadline for number, own in self.schedulers.items() if own.jobs}
        turn = self.turns.next(deadlines, list(self.here), self.coming)
        self.check(turn, deadlines)
        if turn.fetch is not None:
            if self.coming is not None:  # nobody waits for it any more
                self.here.append(self.coming)
            if turn.leaving is not None:
                self.here.remove(turn.leaving)
            self.swaps += 1
            self.coming, self.ready = turn.fetch, self.now + self.swap
            if self.alone:
                self.now = self.ready
                self.here.append(turn.fetch)
                self.coming = None
            self.turns.fetched(turn.fetch, self.ready)
        began = self.now
        if turn.run == self.coming:
            self.now = max(self.now, self.ready)
        if turn.run == MIXING:
            self.here, self.coming = list(range(self.num_experts))[-self.places :], None
        batch = self.schedulers[turn.run].batch(self.now)
        seconds = (self.a_mixed_row if turn.run == MIXING else A_ROW) * sum(job.rows for job in batch)
        self.now, self.computed = self.now + seconds, self.computed + seconds
        self.turns.ran(turn.run, began, self.now)
        self.runs.append(turn.run)
        for job in batch:
            job.velocities -= 1
            if not job.velocities:
                self.schedulers[turn.run].drop(job)
        return turn

    def check(self, turn: Decision, deadlines: dict[int, float]) -> None:
        """What is run has work, and its weights or nothing better to do; what leaves was there."""
        assert turn.run in deadlines
        assert turn.run in (*self.here, self.coming, turn.fetch, MIXING) and turn.run != turn.leaving
        if turn.fetch is not None:
            assert turn.fetch in deadlines and turn.fetch not in self.here
            assert (turn.leaving is None) or turn.leaving in (*self.here, self.coming)
            assert len(self.here) + (self.coming is not None) - (turn.leaving is not None) < self.places

    def ask(self, engine: int, seconds: float, velocities: int = 10, rows: int = 1) -> Job:
        job = Job(rows, velocities, float(rows), self.now + seconds)
        self.schedulers[engine].admit(job, self.now)
        return job


ASKED = st.tuples(st.integers(-1, 4), st.integers(1, 40), st.integers(1, 4), st.floats(0.5, 30))


@settings(max_examples=100)
@given(
    asked=st.lists(ASKED, min_size=1, max_size=40),
    places=st.sampled_from([2, 3, 5]),
    swap=st.sampled_from([0.0, 0.02, 0.2]),
    alone=st.booleans(),
    gap=st.integers(0, 2),
)
def test_all_that_are_let_in_are_met(
    asked: list[tuple[int, int, int, float]], places: int, swap: float, alone: bool, gap: int
) -> None:
    """Whoever was let in while others were has its images in time, by a velocity and a swap."""
    machine = Machine(5, places, swap, alone)
    tolerance = machine.a_mixed_row * MAX_ROWS + swap
    sure = list[Job]()
    for engine, velocities, rows, seconds in asked:
        with contextlib.suppress(OverloadedError):
            others = machine.jobs
            job = machine.ask(engine, seconds, velocities, rows)
            if others:
                sure.append(job)
        for _ in range(gap):
            if machine.jobs:
                finished(machine, sure, tolerance)
    while machine.jobs:
        finished(machine, sure, tolerance)


def finished(machine: Machine, sure: list[Job], tolerance: float) -> None:
    before = set(machine.jobs)
    machine.turn()
    for job in before - set(machine.jobs):
        assert job not in sure or machine.now <= job.deadline + tolerance + 1e-9


@settings(max_examples=20)
@given(
    data=st.data(),
    num_experts=st.integers(3, 6),
    places=st.sampled_from([2, 3]),
    swap=st.sampled_from([0.03, 0.3]),
    share=st.sampled_from([0.1, 0.25, 0.5]),
    alone=st.booleans(),
)
def test_where_all_have_work_swaps_take_no_more_than_their_share(
    data: st.DataObject, num_experts: int, places: int, swap: float, share: float, alone: bool
) -> None:
    """Whatever the deadlines, and whether one computes while another comes."""
    machine = Machine(num_experts, places, swap, alone, share)
    lengths = st.tuples(st.integers(1, 20), st.floats(1e6, 2e6))
    drawn = data.draw(st.lists(lengths, min_size=8, max_size=8))
    for number in range(200):
        for expert in range(num_experts):
            if not machine.schedulers[expert].jobs:
                velocities, seconds = drawn[(number + expert) % len(drawn)]
                machine.ask(expert, seconds, velocities)
        machine.turn()
    took = machine.swaps * swap
    assert took <= share * (machine.computed + took) + places * swap


@pytest.mark.parametrize("cold", [5, MIXING])
@pytest.mark.parametrize("swap", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("alone", [False, True])
def test_who_is_seldom_asked_for_is_met_beside_those_that_always_are(cold: int, swap: float, alone: bool) -> None:
    machine = Machine(6, 2, swap, alone)
    job, done_at, refused = machine.ask(cold, 5.0), None, 0
    tolerance = machine.a_mixed_row * MAX_ROWS + swap
    while machine.now < 6.0:
        for hot in range(5):
            if not machine.schedulers[hot].jobs:
                try:
                    machine.ask(hot, 1.5, velocities=5)
                except OverloadedError:
                    refused += 1
        machine.turn()
        assert all(other.deadline + tolerance > machine.now for other in machine.jobs)
        if done_at is None and not job.velocities:
            done_at = machine.now
    assert done_at is not None and done_at <= job.deadline
    assert machine.runs[-1] != cold and cold in machine.runs
    # Where a swap takes long, not all of those find time who have 1.5 s.
    assert swap == 0.1 or (set(machine.runs) == {*range(5), cold} and not refused)


def test_the_next_is_fetched_while_one_computes_and_computes_once_it_has_come() -> None:
    machine = Machine(3, 2, swap=0.05)
    machine.ask(0, 100.0, velocities=40)
    assert machine.turn() == Decision(0, fetch=0)  # nobody else has work: it waits
    machine.ask(1, 50.0, velocities=40)
    assert machine.turn() == Decision(0, fetch=1)  # a place is free
    while machine.coming is not None and machine.ready > machine.now:
        assert machine.turn() == Decision(0)
    assert machine.turn() == Decision(1)
    machine.ask(2, 20.0, velocities=10)
    turns = [machine.turn() for _ in range(30)]
    # The first has computed for longer, so it is worth its swap sooner; the other computes while the third comes.
    worth_it = next(number for number, turn in enumerate(turns) if turn.fetch == 2)
    assert 8 <= worth_it <= 11 and turns[:worth_it] == [Decision(0)] * worth_it
    assert turns[worth_it] == Decision(1, fetch=2, leaving=0)
    assert [turn.run for turn in turns[worth_it + 1 :]] == [1] * 4 + [2] * 10 + [1] * (30 - worth_it - 15)


def test_without_contention_nothing_is_ever_swapped_out() -> None:
    machine = Machine(3, 5, swap=0.1)
    for expert in (0, 1, 2, 0, 1, 2):
        machine.ask(expert, 100.0 - machine.now, velocities=30)
        machine.turn()
    while machine.jobs:
        assert machine.turn().leaving is None
    assert machine.swaps == 3


def test_who_mixes_waits_until_all_were_worth_their_swaps_and_then_stays_as_long() -> None:
    machine = Machine(3, 2, swap=0.05)
    for expert in (0, 1):
        machine.ask(expert, 100.0, velocities=60)
        machine.turn()
    machine.ask(MIXING, 10.0, velocities=100)
    machine.ask(0, 9.0, velocities=1)
    runs = [machine.turn().run for _ in range(60)]
    first = runs.index(MIXING)
    # 0.15 s each, less the velocity that both had before, and a little where one waited for its weights.
    assert 26 <= first <= 31 and set(runs[:first]) == {0, 1}
    assert set(runs[first:]) == {MIXING}
    while machine.schedulers[MIXING].jobs:
        machine.turn()
    assert machine.turn().run in (0, 1)
    machine.ask(MIXING, 10.0, velocities=20)
    while machine.turn().run != MIXING:
        pass
    machine.ask(2, 2.0, velocities=5)
    # 0.15 s of 0.0475 s each, one of which it has had.
    assert [machine.turn().run for _ in range(5)] == [MIXING] * 3 + [2] * 2


def test_an_expert_that_nobody_waits_for_any_more_makes_room_while_it_comes() -> None:
    turns = Turns(3, 2)
    turns.swapped(1.0)
    turns.fetched(0, 1.0)
    assert turns.next({1: 5.0}, [2], coming=0) == Decision(1, fetch=1, leaving=2)
    assert turns.next({1: math.inf}, [2, 0]) == Decision(1, fetch=1, leaving=2)
    assert turns.next({1: 5.0, 2: 9.0}, [2], coming=0) == Decision(2, fetch=1, leaving=0)


def test_more_than_all_can_do_together_is_refused() -> None:
    """Each engine by itself would have time for it."""
    machine = Machine(4, 2, swap=0.05)
    for expert in range(3):
        machine.ask(expert, 3.0, velocities=40)
    machine.ask(3, 3.0, velocities=40)
    with pytest.raises(OverloadedError, match="more images are asked for than can be made in time") as refused:
        machine.ask(3, 3.0, velocities=100)
    assert 0 < refused.value.retry_after_s < 3
    with pytest.raises(OverloadedError, match="images are being made or wait"):
        machine.ask(0, 1e9, rows=1022)


def test_a_velocity_is_not_shared_at_the_cost_of_another_engines_job() -> None:
    machine = Machine(2, 2, swap=0.0)
    urgent, patient = machine.ask(0, 1.0, velocities=20), machine.ask(0, 50.0, velocities=20, rows=3)
    assert machine.schedulers[0].batch(0.0) == [urgent, patient]
    machine.ask(1, 1.1, velocities=88)
    assert machine.schedulers[0].batch(0.0) == [urgent]
