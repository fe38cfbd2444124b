"""The run view: the holder of each job, as one observer sees it by its own clock."""

import json

import pytest

from ddm_ray.errors import StorageError
from ddm_ray.islands.run_view import RunObserver, RunView, take_key
from ddm_ray.islands.worker_heartbeat import HEARTBEAT, LEASE_SECONDS, WorkerState
from ddm_ray.jobs import stops
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.job_status import START_SECONDS
from ddm_ray.jobs.launches import Launch
from ddm_ray.run.graph import ROUTER, Artifact, shard
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from tests.jobs.attempts import beat, fail

FIRST, SECOND = Artifact("experts/000"), Artifact("experts/001")
ME = WorkerState(id="me/0001", beat=1)


class Eye:
    """An observer on an invented clock, with what others leave on storage."""

    def __init__(self, run: Run):
        self.run, self.now, self.beats = run, -1e6, 0
        self.observer = RunObserver(run, [*run.experts, ROUTER], lambda artifact: 1000.0, lambda: self.now)

    def look(self, seconds: float = 0.0) -> RunView:
        self.now += seconds
        return self.observer.look(ME)

    def beat(self, worker: str, **fields: object) -> None:
        """The next beat of another worker, which has taken what it `holds`."""
        self.beats += 1
        island, _, number = worker.rpartition("/")
        held = str(fields.get("holds", ""))
        takes = len(self.run.store.sizes(f"{held}/takes")) if held else 0
        last = self.run.store.read(take_key(Artifact(held), takes)).decode() if takes else ""
        if held and worker not in last:
            take = json.dumps({"worker": worker, "launch": ""}).encode()
            self.run.store.write(take_key(Artifact(held), takes + 1), take)
            self.observer.list_next()
        note = json.dumps({"beat": self.beats, **fields}).encode()
        self.run.store.write(f"islands/{island}/workers/{number}/{HEARTBEAT}", note)

    def holder(self, artifact: Artifact, seconds: float = 0.0) -> str:
        return next(job.holder for job in self.look(seconds).jobs if job.artifact == artifact)


@pytest.fixture
def eye(partitioned: Run) -> Eye:
    return Eye(partitioned)


def test_what_nobody_has_begun_is_free(eye: Eye) -> None:
    view = eye.look()
    assert [job.artifact for job in view.jobs] == [*eye.run.experts, ROUTER]
    assert all(job.free and job.work == 1000.0 for job in view.jobs)
    assert [worker.id for worker in view.workers] == [ME.id]
    assert view.drained is None and view.ahead is None and not view.finished


def test_the_worker_that_holds_it_owns_it_while_it_beats(eye: Eye) -> None:
    eye.beat("south/0003", holds=FIRST, speed=5.0)
    view = eye.look()
    assert view.jobs[0].holder == "south/0003" and view.jobs[1].free
    assert [(worker.id, worker.speed) for worker in view.workers] == [("south/0003", 5.0), (ME.id, None)]
    assert eye.holder(FIRST, LEASE_SECONDS) == "south/0003"
    eye.beat("south/0003", holds=FIRST, speed=5.0)
    assert eye.holder(FIRST, 1) == "south/0003"
    assert eye.holder(FIRST, LEASE_SECONDS + 1) == ""
    assert [worker.id for worker in eye.look().workers] == [ME.id]


def test_an_attempt_that_beats_owns_it_whoever_began_it(eye: Eye) -> None:
    attempt = claim(eye.run.store, FIRST)
    beat(attempt, 1, 10)
    assert eye.holder(FIRST) == "attempt 1"
    assert eye.holder(FIRST, LEASE_SECONDS - 1) == "attempt 1, silent for 59 s"
    beat(attempt, 2, 20)
    assert eye.holder(FIRST, 2) == "attempt 1"
    assert eye.holder(FIRST, LEASE_SECONDS + 1) == ""


def test_a_failed_attempt_owns_nothing_if_its_launch_tries_no_more(eye: Eye) -> None:
    attempt = claim(eye.run.store, FIRST)
    beat(attempt, 1, 10)
    fail(attempt, "a worker was lost")
    assert eye.holder(FIRST) == "attempt 1", "its launch is about to begin the next one"
    assert eye.holder(FIRST, LEASE_SECONDS + 1) == ""
    other = claim(eye.run.store, SECOND)
    fail(other, "its loss isn't finite", final=True)
    eye.observer.list_next()
    assert eye.holder(SECOND) == ""


def test_slow_steps_are_waited_for(eye: Eye) -> None:
    beat(claim(eye.run.store, FIRST), 1, 10, steps_per_second=0.01)
    assert eye.holder(FIRST) and eye.holder(FIRST, 250)
    assert eye.holder(FIRST, 60) == ""


def test_what_its_worker_has_left_is_free_at_once(eye: Eye) -> None:
    launch = Launch(FIRST, island="south")
    attempt = claim(eye.run.store, FIRST, launch.claim_fields())
    beat(attempt, 1, 10)
    take = {"worker": "south/0001", "launch": launch.id}
    eye.run.store.write(take_key(FIRST, 1), json.dumps(take).encode())
    eye.beat("south/0001", holds=FIRST)
    assert eye.holder(FIRST) == "south/0001"
    eye.beat("south/0001", holds=SECOND)
    assert eye.holder(FIRST, 1) == "" and eye.holder(SECOND) == "south/0001"
    by_hand = claim(eye.run.store, FIRST, Launch(FIRST).claim_fields())
    beat(by_hand, 1, 10)
    eye.observer.list_next()
    assert eye.holder(FIRST, 1) == "attempt 2", "that isn't the worker's"


@pytest.mark.parametrize("take", [b"", b"[]", b'{"worker": "../..", "launch": ""}', b'{"launch": 3}', b"{" * 70_000])
def test_a_take_that_no_worker_wrote_says_nothing(eye: Eye, take: bytes) -> None:
    eye.run.store.write(take_key(FIRST, 1), take)
    beat(claim(eye.run.store, FIRST), 1, 10)
    assert eye.holder(FIRST) == "attempt 1" and eye.observer.takes(FIRST) == 1


def test_a_worker_without_room_holds_nothing_for_ever(eye: Eye) -> None:
    claim(eye.run.store, FIRST)
    for _ in range(30):
        eye.beat("south/0001", holds=FIRST)
        assert eye.holder(FIRST) == "south/0001"
        eye.now += START_SECONDS / 30
    eye.beat("south/0001", holds=FIRST)
    assert eye.holder(FIRST, 60) == ""


def test_of_two_workers_that_hold_it_the_newest_take_counts(eye: Eye) -> None:
    """The first one's training is about to end, its state saved."""
    attempt = claim(eye.run.store, FIRST)
    beat(attempt, 1, 10)
    eye.beat("south/0001", holds=FIRST)
    eye.beat("north/0001", holds=FIRST)
    eye.beat("south/0001", holds=FIRST)
    assert eye.holder(FIRST) == "south/0001"
    eye.run.store.write(take_key(FIRST, 4), b'{"worker": "north/0001", "launch": "1"}')
    eye.observer.list_next()
    assert eye.holder(FIRST) == "north/0001"


def test_a_holder_tells_how_long_it_needs(eye: Eye) -> None:
    eye.beat("south/0001", holds=FIRST)
    assert eye.look().jobs[0].seconds_left is None
    beat(claim(eye.run.store, FIRST), 1, 10, 30, steps_per_second=2.0)
    eye.observer.list_next()
    assert eye.look().jobs[0].seconds_left == 10.0


def test_the_oldest_living_worker_of_an_island_works(eye: Eye) -> None:
    eye.beat("south/0001")
    eye.beat("south/0002")
    assert [worker.id for worker in eye.look().workers] == ["south/0001", ME.id]
    second = eye.observer.look(WorkerState(id="me/0002", beat=1))
    assert second.ahead is None, "the first has no note"
    eye.beat("me/0001", host="n7")
    ahead = eye.observer.look(WorkerState(id="me/0002", beat=1)).ahead
    assert ahead is not None and (ahead.id, ahead.host) == ("me/0001", "n7")
    eye.now += LEASE_SECONDS + 1
    assert eye.observer.look(WorkerState(id="me/0002", beat=1)).ahead is None
    assert not eye.run.store.exists(f"islands/me/workers/0001/{HEARTBEAT}"), "nobody has to read it again"


def test_requests_to_drain_and_to_stop_are_seen(eye: Eye) -> None:
    stops.ask(eye.run.store, stops.drain_key("me"), "the room is cleaned")
    stops.ask(eye.run.store, stops.stop_key(FIRST), "its rows are wrong")
    view = eye.look()
    assert view.drained == "the room is cleaned"
    assert view.jobs[0].obstacle == "is stopped, its rows are wrong" and view.jobs[1].free
    assert stops.take_back(eye.run.store, stops.drain_key("me"))
    assert stops.take_back(eye.run.store, stops.stop_key(FIRST))
    eye.observer.list_next()
    view = eye.look(1)
    assert view.drained is None and view.jobs[0].free


def test_a_take_of_what_was_silent_for_long_begins_anew(eye: Eye) -> None:
    """Else two islands would take it from each other for ever."""
    claim(eye.run.store, FIRST)
    assert eye.holder(FIRST) == "attempt 1"
    eye.beat("south/0001", holds=FIRST)
    assert eye.holder(FIRST, 2 * START_SECONDS) == "south/0001"
    eye.beat("south/0001", holds=FIRST)
    assert eye.holder(FIRST, START_SECONDS / 2) == "south/0001"


def test_inputs_that_are_damaged_stop_no_other_job(eye: Eye) -> None:
    key = f"{shard(0)}/{NAME}"
    eye.run.store.write(key, eye.run.store.read(key)[:-20])
    first, second, *_ = eye.look().jobs
    assert first.obstacle.startswith(f"needs {shard(0)}, which is damaged: ") and second.free


def test_what_may_not_be_deleted_ends_nobody(eye: Eye, monkeypatch: pytest.MonkeyPatch) -> None:
    eye.beat("me/0001")
    later = WorkerState(id="me/0002", beat=1)
    eye.observer.look(later)

    def refuse(key: str) -> None:
        raise StorageError(f"{key}: denied", passes=False)

    monkeypatch.setattr(eye.run.store, "delete_one", refuse)
    eye.now += LEASE_SECONDS + 1
    assert eye.observer.look(later).ahead is None
