"""Who runs next, who is refused, and what a velocity is taken to cost: a plain class, on a clock of the tests' own."""

import contextlib
import pickle
import random
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.serve.engine.scheduler import LOOK_SECONDS, Job, OverloadedError, Scheduler, SharedDevice, Speed


def scheduler(seconds_a_row: float = 0.01, fixed: float = 0.0, **others: object) -> Scheduler:
    """One that has seen batches of 1 and of 8 rows take so long."""
    made = Scheduler(**{"margin": 1.0} | others)
    for _ in range(50):
        for rows in (1, 8):
            made.speed.ran(rows, fixed + rows * seconds_a_row)
    return made


def job(deadline: float, velocities: int = 10, rows: int = 1, experts: float = 1.0) -> Job:
    return Job(rows, velocities, rows * experts, deadline)


@given(fixed=st.floats(0, 1), each=st.floats(1e-6, 1), sizes=st.lists(st.integers(1, 64), min_size=1, max_size=30))
def test_speed_is_the_line_that_batches_lie_on(fixed: float, each: float, sizes: list[int]) -> None:
    speed = Speed()
    for rows in sizes:
        speed.ran(rows, fixed + each * rows)
    right = fixed + each * sizes[-1]
    if len(set(sizes)) > 1:
        assert speed.seconds(100) == pytest.approx(fixed + each * 100, rel=1e-3, abs=1e-6)
    else:
        assert speed.seconds(sizes[-1]) == pytest.approx(right)
        assert speed.seconds(2 * sizes[-1]) == pytest.approx(2 * right)


def test_speed_follows_a_machine_that_slows_down() -> None:
    speed = Speed()
    assert speed.seconds(8) == 0
    for seconds in (0.01, 0.05):
        for _ in range(200):
            speed.ran(8, seconds)
    assert speed.seconds(8) == pytest.approx(0.05, rel=0.01)


def test_one_velocity_that_waited_for_somebody_is_no_reason_to_refuse() -> None:
    """Nor is it what many take from then on, which is learnt."""
    made = scheduler()
    made.speed.ran(8, 30.0)
    made.admit(job(1.0), 0.0)
    made.admit(job(1.0), 0.0)
    assert made.speed.seconds(8) < 0.12  # of .08 before
    for _ in range(200):
        made.speed.ran(8, 30.0)
    assert made.speed.seconds(8) == pytest.approx(30.0, rel=0.05)


def test_the_earliest_deadline_is_first_and_a_batch_has_room_for_so_many_rows() -> None:
    made = scheduler(max_rows=4)
    late, soon, large = job(100.0), job(50.0, rows=2), job(70.0, rows=2)
    for each in (late, soon, large):
        made.admit(each, 0.0)
    assert made.batch(0.0) == [soon, large]
    made.drop(soon)
    assert made.batch(0.0) == [large, late]


def test_a_job_larger_than_a_batch_runs_by_itself() -> None:
    made = scheduler(max_rows=4)
    large, small = job(50.0, rows=10), job(60.0)
    made.admit(large, 0.0)
    made.admit(small, 0.0)
    assert made.batch(0.0) == [large]


def test_what_cannot_be_met_in_time_is_refused_and_says_when_it_may_be() -> None:
    made = scheduler(0.01)
    for _ in range(10):
        made.admit(job(1.0), 0.0)  # 0.1 s each
    with pytest.raises(OverloadedError) as refused:
        made.admit(job(1.0), 0.0)
    assert refused.value.retry_after_s == pytest.approx(0.1)
    assert made.rows == 10
    made.admit(job(1.2), 0.0)


def test_nobody_is_let_in_at_the_cost_of_those_who_are() -> None:
    made = scheduler(0.01)
    made.admit(job(1.0, velocities=90), 0.0)
    with pytest.raises(OverloadedError):
        made.admit(job(0.5, velocities=20), 0.0)
    made.admit(job(0.5, velocities=9), 0.0)


def test_who_has_had_the_last_velocity_keeps_nobody_out() -> None:
    """Between a batch's last velocity and the end of its jobs others may come."""
    made = scheduler(0.01)
    done = job(1.0)
    made.admit(done, 0.0)
    done.velocities = 0
    made.admit(job(0.2), 0.0)


def test_long_jobs_that_share_batches_still_take_all_their_velocities() -> None:
    """Nine of one velocity beside one of ninety: ninety velocities, not the ten that the work would fill."""
    made = scheduler(seconds_a_row=0.001, fixed=0.1, max_rows=16)
    for _ in range(9):
        made.admit(job(20.0, velocities=1), 0.0)
    with pytest.raises(OverloadedError):
        made.admit(job(8.0, velocities=90), 0.0)
    made.admit(job(10.0, velocities=90), 0.0)


def test_who_can_still_be_met_is_not_given_up_for_another() -> None:
    """Without the margin that it was let in with."""
    made = scheduler(0.01, margin=1.5)
    made.admit(job(1.0, velocities=60), 0.0)
    with pytest.raises(OverloadedError):
        made.admit(job(0.9, velocities=20), 0.2)
    made.admit(job(9.0, velocities=20), 0.2)


def test_who_is_late_already_keeps_nobody_out() -> None:
    made = scheduler(0.01)
    made.admit(job(0.5, velocities=200), 0.0)  # alone: met as well as can be
    made.admit(job(0.4, velocities=10), 0.0)


def test_what_a_batch_shares_is_paid_once() -> None:
    """A fixed cost a velocity: ten jobs together take little longer than one."""
    made = scheduler(seconds_a_row=0.001, fixed=0.1, max_rows=16)
    for _ in range(10):
        made.admit(job(1.2), 0.0)
    assert made.rows == 10


def test_rows_in_memory_are_bounded() -> None:
    made = scheduler(1e-6, max_waiting_rows=8)
    made.admit(job(1e9, rows=8), 0.0)
    with pytest.raises(OverloadedError, match="8 images are being made or wait, of 8 at most"):
        made.admit(job(1e9), 0.0)


def test_late_ones_are_those_whose_deadline_has_passed() -> None:
    made = scheduler()
    soon, late = job(1.0), job(2.0)
    made.admit(late, 0.0)
    made.admit(soon, 0.0)
    assert made.late(0.5) == [] and made.late(1.5) == [soon] and made.late(2.0) == [soon, late]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4), st.floats(0.5, 8)), min_size=1, max_size=40))
def test_all_that_are_let_in_are_met(asked: list[tuple[int, int, float]]) -> None:
    """Run as the engine runs them, on a clock that goes by what velocities cost; one is asked for after each."""
    made, now = scheduler(0.01, max_rows=8), 0.0
    hopeless = set[Job]()
    for velocities, rows, seconds in asked:
        each = job(now + seconds, velocities, rows)
        if 0.01 * velocities * rows > seconds:
            hopeless.add(each)
        with contextlib.suppress(OverloadedError):
            made.admit(each, now)
        now = ran(made, now, hopeless)
    while made.rows:
        now = ran(made, now, hopeless)


def ran(made: Scheduler, now: float, hopeless: set[Job]) -> float:
    """The time after one velocity. Who comes while it runs waits for its end, 8 rows at most."""
    batch = made.batch(now)
    now += 0.01 * sum(each.rows for each in batch)
    for each in batch:
        each.velocities -= 1
        if not each.velocities:
            made.drop(each)
            assert each in hopeless or now <= each.deadline + 0.08 + 1e-9
    return now


def test_an_urgent_job_shares_a_batch_only_as_far_as_it_can() -> None:
    made = scheduler(0.01)
    urgent, small, large, tiny = job(1.05, velocities=50), job(5.0), job(9.0, rows=4), job(10.0)
    for each in (urgent, large, small, tiny):
        made.admit(each, 0.0)
    assert made.batch(0.0) == [urgent, small]  # 0.02 s a velocity, 50 times; tiny doesn't overtake large
    assert made.batch(0.1) == [urgent]
    assert made.batch(0.8) == [urgent, small, large, tiny]  # too late for it in any case


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0.01, 1.5)), min_size=2, max_size=7))
def test_as_few_as_can_be_are_given_up(asked: list[tuple[int, float]]) -> None:
    """Beside all ways to choose some of them, one after the other on a machine that has become ten times as slow."""
    made = scheduler(0.001, max_rows=1, margin=1.5)
    for velocities, seconds in asked:
        with contextlib.suppress(OverloadedError):
            made.admit(job(seconds, velocities), 0.0)
    for _ in range(200):
        made.speed.ran(1, 0.01)
    jobs, each = list(made.jobs), made.speed.seconds(1)
    lost = made.device.to_give_up(0.0)
    assert len(jobs) > 1 or not lost

    def in_time(some: Sequence[Job]) -> bool:
        return all(each * sum(one.velocities for one in some[: n + 1]) <= some[n].deadline for n in range(len(some)))

    most = next(count for count in range(len(jobs), -1, -1) if any(map(in_time, combinations(jobs, count))))
    assert len(jobs) == 1 or (len(jobs) - len(lost) == most and in_time([one for one in jobs if one not in lost]))


def test_one_of_two_schedulers_of_a_device_gives_up_what_cannot_be_in_time() -> None:
    device = SharedDevice()
    usual, quicker = scheduler(device=device), scheduler(device=device)
    for _ in range(9):
        quicker.speed.ran(1, 0.004)
    small, large = job(20.0, velocities=100), job(20.0, velocities=200)
    usual.admit(small, 0.0)
    quicker.admit(large, 0.0)
    assert device.to_give_up(18.0) == []  # 1 s and 0.8 s lately
    assert device.to_give_up(18.5) == [large]
    assert (usual.lost(18.5), quicker.lost(18.5)) == ([], [large])


def test_a_device_is_looked_at_once_for_all_its_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = [], SharedDevice.to_give_up
    monkeypatch.setattr(SharedDevice, "to_give_up", lambda device, now: looks.append(now) or look(device, now))
    device = SharedDevice()
    made = [scheduler(device=device) for _ in range(256)]
    jobs = [job(1e6) for _ in made]
    for owner, own in zip(made[:32], jobs, strict=False):
        owner.admit(own, 0.0)
    for now in (0.0, LOOK_SECONDS / 2, LOOK_SECONDS):
        assert not any(owner.lost(now) for owner in made)
    assert looks == [0.0, LOOK_SECONDS]
    made[0].drop(jobs[0])
    assert [own for _, own in device.jobs] == jobs[1:32]


@pytest.mark.parametrize(("slower", "least"), [(1.0, 0.9), (3.0, 0.75)], ids=["steady", "three times as slow"])
@pytest.mark.parametrize(("fixed", "each"), [(0.004, 0.0005), (0.002, 0.002), (0.0005, 0.004)])
def test_five_times_what_can_be_met_costs_no_capacity(fixed: float, each: float, slower: float, least: float) -> None:
    """Jobs of ten times what they take alone; a velocity costs mostly what it costs any batch, or mostly its rows."""
    made, chance = scheduler(each, fixed, margin=1.5), random.Random(0)
    now = coming = busy = 0.0
    done = late = given_up = 0
    alone, full = 25 * (fixed + each), 25 * (fixed + 32 * each) / 32
    while now < 20:
        while coming <= now:
            with contextlib.suppress(OverloadedError):
                made.admit(job(coming + 10 * alone, velocities=25), coming)
            coming += chance.expovariate(5 / full)
        for lost in made.late(now):
            made.drop(lost)
            late += 1
        for lost in made.device.to_give_up(now):
            made.drop(lost)
            given_up += 1
        batch = made.batch(now)
        if not batch:
            now = coming
            continue
        seconds = (fixed + each * len(batch)) * (slower if now > 5 else 1.0)
        made.speed.ran(len(batch), seconds)
        now += seconds
        busy += seconds / (slower if now > 5 else 1.0)
        for one in batch:
            one.velocities -= 1
            if not one.velocities:
                made.drop(one)
                done += now <= one.deadline
                late += now > one.deadline
    assert done * full >= least * busy
    assert late <= 0.02 * (done + late + given_up)
    assert given_up == 0 or slower > 1


def test_a_refusal_crosses_processes() -> None:
    back = pickle.loads(pickle.dumps(OverloadedError("too much", 2.5)))
    assert (str(back), back.retry_after_s) == ("too much", 2.5)
