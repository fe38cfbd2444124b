"""What the names of a job's files say, for one job and for many by one listing."""

import pytest

from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.job_files import JobFiles, list_jobs
from ddm_ray.run.graph import Artifact
from ddm_ray.run.manifest import NAME
from ddm_ray.store.store import Store
from tests.jobs.attempts import beat, fail, publish, save

JOBS = [Artifact(path) for path in ("experts/000", "experts/001", "experts/1000", "router")]


@pytest.fixture
def store() -> Store:
    return Store("memory:///")


def test_nothing_is_there_yet(store: Store) -> None:
    for job, files in list_jobs(store, JOBS).items():
        assert files == JobFiles(job, {})
        assert (files.committed, files.attempts, files.saved, files.published) == (False, [], (0, 0), None)


@pytest.mark.parametrize("together", [False, True], ids=["one", "many"])
def test_what_the_names_say(store: Store, together: bool) -> None:
    job = JOBS[1]
    for other in (JOBS[0], *JOBS[2:]):
        save(claim(store, other), 7)
        store.write(f"{other}/{NAME}", b"")
    first, second, _ = (claim(store, job) for _ in range(3))
    publish(first, 20)
    publish(first, 1000)
    save(first, 900)
    publish(second, 40)
    save(second, 40)
    save(second, 50)
    store.write(f"{second.state_prefix(60)}/rank-000/INDEX.json", b"")
    store.write(f"{second.weights_prefix(2000)}/ema.safetensors", b"half")
    beat(second, 1, 55)
    fail(first, "lost")
    files = list_jobs(store, JOBS if together else [job])[job]
    assert files.sizes == store.sizes(job)
    assert (files.committed, files.attempts) == (False, [1, 2, 3])
    assert files.saved == (2, 50), "the newest attempt's that committed one, however far an older one came"
    assert files.published == 1000
    flags = [(files.claimed(number), files.beats(number), files.failed(number)) for number in (1, 2, 3, 4)]
    assert flags == [(True, False, True), (True, True, False), (True, False, False), (False, False, False)]
    store.write(f"{job}/{NAME}", b"")
    assert list_jobs(store, JOBS if together else [job])[job].committed


def test_older_attempts_that_may_train_on(store: Store) -> None:
    job = JOBS[1]
    attempts = [claim(store, job) for _ in range(5)]

    def older() -> list[int]:
        return list_jobs(store, [job])[job].older

    assert older() == [], "none has beaten"
    for attempt in attempts:
        beat(attempt, 1, 5)
    assert older() == [4, 3, 2, 1]
    fail(attempts[2], "lost")
    assert older() == [4, 2, 1]
    save(attempts[1], 5)
    assert older() == [4, 2], "attempt 2 has taken the place of attempt 1, not its own"
    save(attempts[4], 7)
    assert older() == []


def test_the_newest_picture_is_that_of_the_last_step(store: Store) -> None:
    job = JOBS[1]
    assert list_jobs(store, [job])[job].picture is None
    first, second = claim(store, job), claim(store, job)
    store.write(first.picture_key(900), b"png")
    store.write(f"{first.weights_prefix(1000)}/grid.png", b"png")
    store.write(second.picture_key(950), b"png")
    store.write(f"{second.prefix}/pictures/step-000002000.svg", b"what is no picture")
    store.write(f"{job}/attempts/x/pictures/step-000003000.png", b"of no attempt")
    assert list_jobs(store, JOBS)[job].picture == (1000, "attempts/0001/weights/step-000001000/grid.png")
    store.write(second.picture_key(1000), b"png")
    assert list_jobs(store, JOBS)[job].picture == (1000, "attempts/0002/pictures/step-000001000.png")
