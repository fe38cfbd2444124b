"""Promises of a plan: who is late for what it gave them is left out, by the observer's own clock."""

from ddm_ray.islands.choose import OpenJob, Worker
from ddm_ray.islands.promises import Promises
from ddm_ray.storage.graph import expert
from tests.islands.pretend_workers import GRACE

SLOW, FAST = Worker("slow", 1.0), Worker("fast", 4.0)


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
