"""Launches: one count of failures in a row for all who see them, and why a launch ended, by a listing and claims."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.errors import CorruptArtifact, StorageError, TrainingError
from ddm_ray.jobs.attempts import OUT_OF_MEMORY, Attempt, claim
from ddm_ray.jobs.job_files import JobFiles, list_jobs
from ddm_ray.jobs.launches import FailureBudget, Launch, LaunchReader, failures_in_a_row, has_given_up
from ddm_ray.run.graph import Artifact, expert
from ddm_ray.store.store import Store
from tests.jobs.attempts import beat, save

pytestmark = pytest.mark.contract

JOB = Artifact("experts/000")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "run"))


def files_of(store: Store) -> JobFiles:
    return list_jobs(store, [JOB])[JOB]


@settings(deadline=None)
@given(
    failures=st.lists(st.tuples(st.sampled_from(["workers", "controller"]), st.booleans()), max_size=12),
    max_failures=st.integers(0, 4),
)
def test_workers_and_controllers_spend_one_budget(
    tmp_path_factory: pytest.TempPathFactory, failures: list[tuple[str, bool]], max_failures: int
) -> None:
    """In any order, and only failures in a row without a newly saved state. Two counts would endure their product."""
    store, launch = Store(str(tmp_path_factory.mktemp("budget"))), Launch(JOB)
    # Neither lives as long as the launch: a controller is replaced, and a supervisor that dies too.
    budget = {who: lambda: FailureBudget(store.url, launch, max_failures) for who in ("workers", "controller")}
    row = 0
    for who, saved in failures:
        attempt = claim(store, JOB, launch.claim_fields())
        if saved:
            save(attempt, 10)
        row = 1 if saved else row + 1
        assert budget[who]().spend(f"{who} died") == (row > max_failures)
        assert failures_in_a_row(files_of(store), launch.id) == row
        if row > max_failures:
            assert has_given_up(files_of(store), launch.id)
            assert json.loads(store.read(launch.given_up_key))["error"] == f"{who} died"
            return
    assert not has_given_up(files_of(store), launch.id)


def test_running_out_of_memory_does_not_count_while_fewer_rows_can_be_taken(store: Store) -> None:
    for rows in (4, 2):
        budget = FailureBudget(store.url, Launch(JOB), 0)
        claim(store, JOB).fail({"error": "no memory", "kind": OUT_OF_MEMORY, "final": False, "micro_batch": rows})
        assert not budget.spend("no memory")
        assert budget.spend("lost"), "once each: workers that die without an attempt run out of nothing"
    claim(store, JOB).fail({"error": "no memory", "kind": OUT_OF_MEMORY, "final": False, "micro_batch": 1})
    assert FailureBudget(store.url, Launch(JOB), 0).spend("no memory")


def test_nothing_counts_while_storage_is_away(store: Store) -> None:
    Path(store.url).mkdir(exist_ok=True)
    budget = FailureBudget(f"{store.url}/{'x' * 300}", Launch(JOB), 0)  # no disk takes such a name
    assert not any(budget.spend("lost") for _ in range(3))


def test_failures_that_cannot_be_written_count_and_the_refusal_is_kept(store: Store) -> None:
    """A full disk, or one that can only be read, would else have the launch begin again for ever."""
    in_the_way = Path(store.url) / JOB / "launches"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_bytes(b"")  # no folder: nothing below can be written, but the job can be listed
    budget = FailureBudget(store.url, Launch(JOB), 2)
    assert [budget.spend("no space left") for _ in range(2)] == [False, False] and budget.refusal is None
    assert budget.spend("no space left")
    assert budget.refusal is not None and "GIVEN_UP" in str(budget.refusal)
    save(claim(store, JOB), 10)
    assert not budget.spend("no space left"), "only those in a row without a newly saved state"


def test_written_and_unwritten_failures_are_one_count(store: Store) -> None:
    launch = Launch(JOB)
    budget = FailureBudget(store.url, launch, 2)
    assert not budget.spend("lost")
    launches, aside = Path(store.url) / JOB / "launches", Path(store.url) / "aside"
    launches.rename(aside)
    launches.write_bytes(b"")
    assert not budget.spend("no space left")
    launches.unlink()
    aside.rename(launches)
    assert budget.spend("lost") and budget.refusal is None
    assert has_given_up(files_of(store), launch.id)


def test_running_out_of_memory_counts_where_its_excuse_cannot_be_written(store: Store) -> None:
    note = {"error": "no memory", "kind": OUT_OF_MEMORY, "final": False, "micro_batch": 4}
    claim(store, JOB).fail(note)
    (Path(store.url) / JOB / "launches").write_bytes(b"")
    budget = FailureBudget(store.url, Launch(JOB), 0)
    assert budget.spend("no memory") and budget.refusal


def write_failure(store: Store, attempt: int, final: bool, kind: str = "CorruptArtifact") -> None:
    note = {"error": "rows are cut", "kind": kind, "final": final}
    store.write(f"{Attempt(store, JOB, attempt).prefix}/FAILED", json.dumps(note).encode())


def test_what_an_attempt_says_is_final_ends_its_launch(store: Store) -> None:
    claim(store, JOB)
    write_failure(store, 1, final=True)
    launch = Launch(JOB)
    reader = LaunchReader(store, launch, files_of(store))
    assert reader.error(files_of(store)) is None, "that attempt was another launch's"
    claim(store, JOB, launch.claim_fields())
    assert reader.error(files_of(store)) is None
    write_failure(store, 2, final=False)
    assert reader.error(files_of(store)) is None
    claim(store, JOB, {"launch": "another"})
    write_failure(store, 3, final=True)
    assert reader.error(files_of(store)) is None, "another launch may lack what this one has"
    claim(store, JOB, launch.claim_fields())
    assert reader.attempts(files_of(store)) == [2, 4]
    write_failure(store, 4, final=True)
    error = reader.error(files_of(store))
    assert type(error) is CorruptArtifact and str(error) == f"{JOB}: rows are cut"
    write_failure(store, 4, final=True, kind="StorageError")
    refused = LaunchReader(store, launch, JobFiles(JOB, {})).error(files_of(store))
    assert type(refused) is StorageError and not refused.passes
    write_failure(store, 4, final=True, kind="OutOfMemoryError")
    assert type(LaunchReader(store, launch, JobFiles(JOB, {})).error(files_of(store))) is TrainingError


def test_a_launch_that_has_given_up_says_why(store: Store) -> None:
    launch = Launch(JOB)
    reader = LaunchReader(store, launch, files_of(store))
    Launch(JOB).give_up(store, TrainingError("another's"))
    assert reader.error(files_of(store)) is None
    launch.give_up(store, TrainingError("the process was killed"))
    launch.give_up(store, TrainingError("and again"))
    error = reader.error(files_of(store))
    assert type(error) is TrainingError and str(error) == f"{JOB}: the process was killed"


@pytest.mark.parametrize("note", [b"", b'{"why": "x"}', b"[" * 2**20])
def test_a_note_of_giving_up_that_cannot_be_read_still_ends_the_launch(store: Store, note: bytes) -> None:
    launch = Launch(JOB)
    store.write(launch.given_up_key, note)
    error = LaunchReader(store, launch, JobFiles(JOB, {})).error(files_of(store))
    assert str(error) == f"{JOB}: for a reason that can't be read"


def test_a_look_at_all_jobs_is_one_request(store: Store, requests: Counter[str]) -> None:
    """Files are read once each, however often is looked: a claim for each attempt, a note for one that failed."""
    jobs = [expert(number) for number in range(16)]
    launches = {job: Launch(job) for job in jobs}
    readers = {job: LaunchReader(store, launches[job], files) for job, files in list_jobs(store, jobs).items()}
    for job in jobs:
        attempt = claim(store, job, launches[job].claim_fields())
        beat(attempt, 1, 10)
        save(attempt, 5)
    attempt.fail({"error": "lost", "kind": "LostWorker", "final": False})
    requests.clear()

    def look() -> Counter[str]:
        requests.clear()
        files = list_jobs(store, jobs)
        assert not any(files[job].committed or readers[job].error(files[job]) for job in jobs)
        assert all(files[job].saved == (1, 5) for job in jobs)
        return requests.copy()

    assert [look() for _ in range(3)] == [Counter(list=1, get=len(jobs) + 1), Counter(list=1), Counter(list=1)]
