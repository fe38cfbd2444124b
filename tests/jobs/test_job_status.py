"""How far a job is, from what its attempts left: the newest counts, a newer one takes a failure back."""

from typing import Any

import pytest

from ddm_ray.cli.fixes import phrase
from ddm_ray.errors import TrainingError
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.job_status import job_status
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.status import Status
from ddm_ray.run.graph import Artifact
from ddm_ray.store.store import Store
from tests.jobs.attempts import beat, save

JOB = Artifact("experts/001")


@pytest.fixture
def store() -> Store:
    return Store("memory:///")


def test_nothing_is_said_of_a_job_that_nobody_began(store: Store) -> None:
    store.write(f"{JOB}/launches/x/ray/y/FAILED", b"Ray's own")
    assert job_status(store, JOB) is None


def test_the_newest_attempt_is_the_one_that_counts(store: Store) -> None:
    first = claim(store, JOB)
    job = job_status(store, JOB)
    assert job and (job.attempt, job.beat, job.phase, job.step, job.steps) == (1, None, "starting", 0, None)
    beat(first, 1, 0, phase="publishing")
    beat(first, 2, 90)
    save(first, 50)
    job = job_status(store, JOB)
    assert job and (job.attempt, job.beat, job.phase, job.step, job.steps) == (1, 2, "training", 90, 300)
    assert (job.value("loss"), job.value("mfu"), job.value("momentum")) == (0.12345, 0.41, None)
    second = claim(store, JOB)
    job = job_status(store, JOB)
    assert job and (job.attempt, job.beat, job.phase, job.step, job.steps) == (2, None, "starting", 50, 300)
    beat(second, 1, 51, mfu=None)
    beat(first, 3, 120)
    job = job_status(store, JOB)
    assert job and (job.attempt, job.beat, job.step, job.value("mfu")) == (2, 1, 51, None)


def failure(store: Store) -> dict[str, Any] | None:
    """Why the newest attempt ended, as its progress tells."""
    job = job_status(store, JOB)
    assert job
    return job.failure


def test_a_launch_that_gave_up_begins_no_more(store: Store) -> None:
    launch = Launch(JOB)
    claim(store, JOB, launch.claim_fields()).fail({"error": "no rows", "kind": "OSError", "final": False})
    assert failure(store) == {"error": "no rows", "kind": "OSError", "final": False, "attempt": 1}
    launch.give_up(store, TrainingError("no rows"))
    assert failure(store) == {"error": "no rows; given up", "kind": "OSError", "final": True, "attempt": 1}
    claim(store, JOB, Launch(JOB).claim_fields()).fail({"error": "x", "kind": "", "final": False})
    newest_failure = failure(store)
    assert newest_failure and not newest_failure["final"]


def test_a_launch_of_an_older_version_that_gave_up_begins_no_more(store: Store) -> None:
    marker = f"{JOB}/attempts/_ray/0123456789ab/FAILED"  # its claims name this key in place of an id
    claim(store, JOB, {"launch": marker}).fail({"error": "no rows", "kind": "OSError", "final": False})
    assert failure(store) == {"error": "no rows", "kind": "OSError", "final": False, "attempt": 1}
    store.write(marker, b"no rows")
    assert failure(store) == {"error": "no rows; given up", "kind": "OSError", "final": True, "attempt": 1}


@pytest.mark.parametrize("content", [b"{", b'{"final": 1}'])
def test_a_damaged_record_still_says_that_it_failed(store: Store, content: bytes) -> None:
    attempt = claim(store, JOB)
    store.write(f"{attempt.prefix}/FAILED", content)
    assert failure(store) == {"error": "for a reason that can't be read", "kind": "", "final": False, "attempt": 1}


@pytest.mark.parametrize("artifact", ["teacher", "experts/1", "", 3, None])
def test_a_fix_for_an_artifact_of_another_version_is_left_out(store: Store, artifact: object) -> None:
    fix = {"do": "Make", "run": "runs/a", "artifact": artifact}
    claim(store, JOB).fail({"error": "no student", "kind": "MissingArtifact", "final": True, "fix": fix})
    described = describe(Status(JOB, "failed", job=job_status(store, JOB), run="runs/a"), phrase)
    assert described.startswith("failed: no student, attempt 1; once that is mended, `ddm train runs/a expert 1`")


def test_of_a_note_without_end_no_more_is_read_than_it_may_have(store: Store) -> None:
    attempt = claim(store, JOB)
    store.write(f"{attempt.prefix}/FAILED", b'{"error": "no rows"}' + b" " * 2**16)
    assert failure(store) == {"error": "no rows", "kind": "", "final": False, "attempt": 1}
    store.write(f"{attempt.prefix}/FAILED", b"[" * 2**20)
    newest_failure = failure(store)
    assert newest_failure and newest_failure["error"] == "for a reason that can't be read"
