"""When an attempt has to end early, and the note that it leaves."""

from contextlib import suppress
from itertools import count

import pytest

from ddm_ray.errors import OutOfMemory, Preempted, Stopped, Superseded
from ddm_ray.jobs.attempts import Attempt, claim
from ddm_ray.jobs.stops import ask, stop_key
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.train import membership
from ddm_ray.train.job import TrainJob, train_job
from ddm_ray.train.membership import Membership
from ddm_ray.train.step_sync import Agreed, Flags
from tests.conftest import wait_for

EXPERT = Artifact("experts/001")

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.fixture
def job(short_run: Run, monkeypatch: pytest.MonkeyPatch) -> TrainJob:
    monkeypatch.setattr(membership, "LOOK_SECONDS", 0.01)
    return train_job(short_run, EXPERT)


def end_by(error: Exception, run: Run, job: TrainJob) -> dict:
    """The note of an attempt that this error ends."""
    with suppress(type(error)), Membership(run, job, TrainPlacement(micro_batch=2)):
        raise error
    note = Attempt(run.store, EXPERT, 1).failure()
    assert note
    return note


def test_an_undisturbed_one_stays(short_run: Run, job: TrainJob) -> None:
    with Membership(short_run, job, TrainPlacement()) as member:
        assert member.flags() == Flags()
        member.after(1, Agreed((), Flags()))
    assert Attempt(short_run.store, EXPERT, 1).failure() is None


def test_notice_that_the_machine_goes_ends_it_once_all_have_saved(short_run: Run, job: TrainJob) -> None:
    with Membership(short_run, job, TrainPlacement(), notice=lambda: True) as member:
        assert member.flags() == Flags(leaving=True)
        member.after(7, Agreed((), Flags(leaving=True)))
        with pytest.raises(Preempted, match="asked to leave; step 7 is saved"):
            member.leave(7)


def test_a_request_to_stop_ends_it(short_run: Run, job: TrainJob) -> None:
    with Membership(short_run, job, TrainPlacement()) as member:
        assert ask(short_run.store, stop_key(EXPERT), "no more money")
        wait_for(lambda: member.flags().leaving, 60)
        with pytest.raises(Stopped, match="is stopped, no more money; step 3 is saved"):
            member.leave(3)


def test_a_newer_attempt_that_trains_ends_it(short_run: Run, job: TrainJob) -> None:
    steps = count()
    with Membership(short_run, job, TrainPlacement()) as member:
        newer = claim(short_run.store, EXPERT)

        def is_superseded() -> bool:
            step = next(steps)
            newer.beat({"beat": step, "phase": "training", "step": step})
            return member.flags().superseded

        wait_for(is_superseded, 60)
        with pytest.raises(Superseded, match="attempt 1 ends after step 5: attempt 2 "):
            member.after(5, Agreed((), Flags(superseded=True)))


def test_the_error_that_ends_it_is_noted(short_run: Run, job: TrainJob) -> None:
    note = end_by(OutOfMemory("micro_batch 2: no memory"), short_run, job)
    assert (note["kind"], note["final"], note["micro_batch"]) == ("OutOfMemory", False, 2)
