"""A cache of device slots: deadlines, what swaps cost, nobody starves; plain classes on a clock of the tests' own."""

import contextlib
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddm_ray.serve.engine.scheduler import Job, OverloadedError, Scheduler, Speed
from ddm_ray.serve.engine.swap_scheduler import MIXING, Decision, SwapScheduler

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
    num_slots: int
    swap: float
    alone: bool = False
    margin: float = 1.0
    now: float = 0.0
    here: list[int] = field(default_factory=list)
    coming: int | None = None
    ready: float = 0.0
    swaps: int = 0
    computed: float = 0.0
    runs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = SwapScheduler(self.num_experts, self.num_slots)
        for _ in range(50):
            self.slots.swapped(self.swap)
        engines = (*range(self.num_experts), MIXING)
        self.schedulers = {each: Scheduler(MAX_ROWS, margin=self.margin, device=self.slots) for each in engines}
        self.a_mixed_row = A_ROW + self.num_experts * self.swap / MAX_ROWS
        for engine, scheduler in self.schedulers.items():
            scheduler.speed = learnt(self.a_mixed_row if engine == MIXING else A_ROW)

    @property
    def jobs(self) -> list[Job]:
        return [job for _, job in self.slots.jobs]

    @property
    def deadlines(self) -> dict[int, float]:
        return {number: own.jobs[0].deadline for number, own in self.schedulers.items() if own.jobs}

    def turn(self) -> Decision:
        """Run one velocity as the engines do; those whose last it was, have gone."""
        if self.coming is not None and self.ready <= self.now:
            self.here.append(self.coming)
            self.coming = None
        deadlines = self.deadlines
        turn = self.slots.next(deadlines, list(self.here), self.coming, self.now)
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
        if turn.run == self.coming:
            self.now = max(self.now, self.ready)
        if turn.run == MIXING:
            self.here, self.coming = list(range(self.num_experts))[-self.num_slots :], None
        batch = self.schedulers[turn.run].batch(self.now)
        seconds = (self.a_mixed_row if turn.run == MIXING else A_ROW) * sum(job.rows for job in batch)
        self.now, self.computed = self.now + seconds, self.computed + seconds
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
            assert len(self.here) + (self.coming is not None) - (turn.leaving is not None) < self.num_slots

    def ask(self, engine: int, seconds: float, velocities: int = 10, rows: int = 1) -> Job:
        job = Job(rows, velocities, float(rows), self.now + seconds)
        self.schedulers[engine].admit(job, self.now)
        return job


@settings(max_examples=100)
@given(
    asked=st.lists(
        st.tuples(st.integers(-1, 4), st.integers(1, 40), st.integers(1, 4), st.floats(0.5, 30)),
        min_size=1,
        max_size=40,
    ),
    num_slots=st.sampled_from([2, 3, 5]),
    swap=st.sampled_from([0.0, 0.02, 0.2]),
    alone=st.booleans(),
    gap=st.integers(0, 2),
)
def test_all_that_are_let_in_are_met(
    asked: list[tuple[int, int, int, float]], num_slots: int, swap: float, alone: bool, gap: int
) -> None:
    """A job that was let in while there were others is done in time, by a velocity and a swap; at the usual margin."""
    machine = Machine(5, num_slots, swap, alone, margin=1.5)
    tolerance = machine.a_mixed_row * MAX_ROWS + swap
    sure = list[Job]()
    for engine, velocities, rows, seconds in asked:
        with contextlib.suppress(OverloadedError):
            others = machine.jobs
            job = machine.ask(engine, seconds, velocities, rows)
            if others:
                sure.append(job)
        for _ in range(gap):
            finish_one(machine, sure, tolerance)
    while machine.jobs:
        finish_one(machine, sure, tolerance)


def finish_one(machine: Machine, sure: list[Job], tolerance: float) -> None:
    """Run one velocity, if there is work: the jobs that it finishes are in time."""
    before = set(machine.jobs)
    if before:
        machine.turn()
    for job in before - set(machine.jobs):
        assert job not in sure or machine.now <= job.deadline + tolerance + 1e-9


ASKED = st.tuples(st.integers(-1, 4), st.integers(1, 200), st.integers(1, 4), st.floats(0.5, 30))


@settings(max_examples=100)
@given(
    asked=st.lists(ASKED, min_size=4, max_size=12),
    num_slots=st.sampled_from([2, 3]),
    swap=st.sampled_from([0.0, 0.02, 0.2]),
    alone=st.booleans(),
    gap=st.integers(0, 2),
)
@example([(0, 1, 1, 1.0), (-1, 1, 1, 1.0), (3, 3, 3, 1.0), (4, 1, 4, 1.0)], 2, 0.0, False, 0)
def test_the_most_urgent_waits_for_a_few_swaps_at_most(
    asked: list[tuple[int, int, int, float]], num_slots: int, swap: float, alone: bool, gap: int
) -> None:
    """One on its way, two since others were displaced, and its own; each is noticed after a velocity.

    So nobody starves, however many others have work: who waits becomes the most urgent before its time is over.
    """
    machine = Machine(5, num_slots, swap, alone, margin=1e-9)  # all are let in
    longest = MAX_ROWS * (machine.a_mixed_row if any(engine == MIXING for engine, *_ in asked) else A_ROW)
    urgent, since = None, 0.0
    while asked or machine.jobs:
        if asked:
            engine, velocities, rows, seconds = asked.pop(0)
            machine.ask(engine, seconds, velocities, rows)
        for _ in range(gap if asked else 1):
            if not machine.jobs:
                break
            first = min(machine.deadlines, key=lambda each: (machine.deadlines[each], each))
            # Of equal deadlines none is more urgent, and none displaces another.
            equal = list(machine.deadlines.values()).count(machine.deadlines[first]) > 1
            if first != urgent or equal:
                urgent, since = first, machine.now
            began = machine.now
            ran = machine.turn().run
            assert (began if ran == urgent else machine.now) - since <= 4 * swap + 3 * longest + 1e-9
            if ran == urgent:
                since = machine.now


@settings(max_examples=20)
@given(
    data=st.data(),
    num_experts=st.integers(3, 6),
    num_slots=st.sampled_from([2, 3]),
    swap=st.sampled_from([0.03, 0.3]),
    alone=st.booleans(),
)
def test_where_all_have_work_swaps_take_no_more_than_half_of_the_time(
    data: st.DataObject, num_experts: int, num_slots: int, swap: float, alone: bool
) -> None:
    """Whatever the deadlines, and whether one computes while another comes."""
    machine = Machine(num_experts, num_slots, swap, alone)
    lengths = st.tuples(st.integers(1, 20), st.floats(1e6, 2e6))
    drawn = data.draw(st.lists(lengths, min_size=8, max_size=8))
    for number in range(200):
        for expert in range(num_experts):
            if not machine.schedulers[expert].jobs:
                velocities, seconds = drawn[(number + expert) % len(drawn)]
                machine.ask(expert, seconds, velocities)
        machine.turn()
    assert machine.swaps * swap <= machine.now / 2 + num_slots * swap


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
    assert machine.turn() == Decision(0, fetch=1)  # a slot is free
    while machine.coming is not None and machine.ready > machine.now:
        assert machine.turn() == Decision(0)
    assert machine.turn() == Decision(1)
    machine.ask(2, 20.0, velocities=2)
    assert machine.turn() == Decision(1, fetch=2, leaving=0)  # whose deadline is the latest
    assert [machine.turn() for _ in range(6)] == [Decision(1)] * 4 + [Decision(2)] * 2
    assert machine.turn() == Decision(1, fetch=0, leaving=2)  # which has no work any more


def test_who_has_come_in_anothers_place_keeps_its_slot_for_as_long_as_the_swap_took() -> None:
    machine = Machine(4, 2, swap=0.05)
    for expert, seconds in ((0, 100.0), (1, 50.0)):
        machine.ask(expert, seconds, velocities=40)
        machine.turn()
    machine.ask(2, 30.0, velocities=40)
    while machine.turn().fetch != 2:
        pass
    machine.ask(3, 20.0, velocities=40)
    began = machine.now - A_ROW
    while machine.turn().fetch != 3:
        pass
    assert 0.1 <= machine.now - A_ROW - began + 1e-9 <= 0.1 + A_ROW + 2e-9  # noticed after a velocity
    assert [machine.turn().fetch for _ in range(30)] == [None] * 30  # nobody else is more urgent


def test_without_contention_nothing_is_ever_swapped_out() -> None:
    machine = Machine(3, 5, swap=0.1)
    for expert in (0, 1, 2, 0, 1, 2):
        machine.ask(expert, 100.0 - machine.now, velocities=30)
        machine.turn()
    while machine.jobs:
        assert machine.turn().leaving is None
    assert machine.swaps == 3


def test_who_mixes_displaces_all_and_is_displaced_like_one() -> None:
    machine = Machine(3, 2, swap=0.05)
    for expert in (0, 1):
        machine.ask(expert, 100.0, velocities=60)
        machine.turn()
    machine.ask(MIXING, 10.0, velocities=6)
    assert machine.turn().run == MIXING
    machine.ask(2, 2.0, velocities=5)
    # 0.1 s of 0.0475 s each, one of which it has had.
    assert [machine.turn().run for _ in range(3)] == [MIXING] * 2 + [2]
    began = machine.now - A_ROW
    while machine.turn().run != MIXING:
        pass
    assert 0.1 <= machine.now - machine.a_mixed_row - began + 1e-9 <= 0.1 + A_ROW + 2e-9
    assert [machine.turn().run for _ in range(3)] == [MIXING] * 2 + [1]


def test_an_expert_that_nobody_waits_for_any_more_makes_room_while_it_comes() -> None:
    slots = SwapScheduler(3, 2)
    slots.swapped(1.0)
    assert slots.next({1: 5.0}, [2], 0, 0.0) == Decision(1, fetch=1, leaving=2)
    assert slots.next({1: math.inf}, [2, 0], None, 0.0) == Decision(1, fetch=1, leaving=2)
    assert slots.next({1: 5.0, 2: 9.0}, [2], 0, 0.0) == Decision(2, fetch=1, leaving=0)


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
