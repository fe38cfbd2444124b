"""A take-over: which launches are asked to end, and how long the living attempt is waited for."""

import pytest

from ddm_ray.islands.choose import OpenJob
from ddm_ray.islands.takeover import TakeOver
from ddm_ray.islands.worker_heartbeat import LEASE_SECONDS
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.jobs.job_status import START_SECONDS
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.stops import launch_stop_key
from ddm_ray.run.graph import expert
from ddm_ray.run.run import Run
from tests.jobs.attempts import beat, fail

JOB = expert(0)


def begin(run: Run, launch: Launch) -> Launch:
    run.store.write(launch.begun_key, b"{}")
    return launch


def taken_over(run: Run, job: OpenJob, before: dict[str, object], now: list[float]) -> TakeOver:
    return TakeOver(run, JOB, "worker north/0001", bool(job.holder), before, lambda: now[0])


def attempt_of(run: Run, launch: Launch) -> Attempt:
    attempt = claim(run.store, JOB, launch.claim_fields())
    beat(attempt, 1, 10)
    return attempt


def test_all_launches_that_may_begin_an_attempt_are_asked_to_end(partitioned: Run) -> None:
    """Whichever began last by their own clocks. One that began before the newest attempt is over, but for its own."""
    over = begin(partitioned, Launch(JOB, "f" * 8))
    claim(partitioned.store, JOB, Launch(JOB, "0" * 8).claim_fields())
    newest = begin(partitioned, Launch(JOB, "1" * 8, after=1))
    attempt_of(partitioned, newest)
    others = [begin(partitioned, Launch(JOB, name * 8, after=2)) for name in ("2", "9")]
    waiting = Launch(JOB, "3" * 8)
    taken_over(partitioned, OpenJob(JOB, 1.0, "south/0001"), {"launch": waiting.id}, [0.0])
    asked = {each.id for each in (over, newest, *others, waiting) if partitioned.store.exists(launch_stop_key(each))}
    assert asked == {newest.id, *(each.id for each in others), waiting.id}


@pytest.mark.parametrize("launch", ["", "..", "../../rows", "x" * 8, "a/b", "f" * 41])
def test_a_take_that_names_no_launch_leads_nowhere(partitioned: Run, launch: str) -> None:
    before = {*partitioned.store.sizes("")}
    taken_over(partitioned, OpenJob(JOB, 1.0), {"launch": launch}, [0.0])
    assert {*partitioned.store.sizes("")} == before


def test_a_living_attempt_is_waited_for_until_it_ends(partitioned: Run) -> None:
    now, attempt = [0.0], attempt_of(partitioned, begin(partitioned, Launch(JOB, "1" * 8)))
    take_over = taken_over(partitioned, OpenJob(JOB, 1.0, "south/0001"), {}, now)
    for step in range(5):
        now[0] += LEASE_SECONDS
        beat(attempt, 2 + step, 20)
        assert not take_over.done
    fail(attempt, "saved")
    assert take_over.done


@pytest.mark.parametrize(("beats", "seconds"), [(False, LEASE_SECONDS), (True, START_SECONDS)])
def test_it_is_waited_for_no_longer_than_a_lease_or_a_start(partitioned: Run, beats: bool, seconds: float) -> None:
    now, attempt = [0.0], attempt_of(partitioned, begin(partitioned, Launch(JOB, "1" * 8)))
    take_over = taken_over(partitioned, OpenJob(JOB, 1.0, "south/0001"), {}, now)
    while now[0] < seconds:
        if beats:
            beat(attempt, int(now[0]) + 2, 20)
        assert not take_over.done
        now[0] += LEASE_SECONDS / 4
    now[0] += 1
    assert take_over.done


def test_a_job_without_a_holder_is_begun_at_once(partitioned: Run) -> None:
    attempt_of(partitioned, begin(partitioned, Launch(JOB, "1" * 8)))
    assert taken_over(partitioned, OpenJob(JOB, 1.0), {}, [0.0]).done
