"""The board: who trains what, as one observer sees it by its own clock."""

import json
from dataclasses import replace

import pytest

from ddm_ray.errors import StorageError
from ddm_ray.islands.board import ROOM_SECONDS, Board, View, take_key
from ddm_ray.islands.presence import PRESENCE, Presence
from ddm_ray.storage import stops
from ddm_ray.storage.attempts import claim
from ddm_ray.storage.graph import ROUTER, Artifact, shard
from ddm_ray.storage.launches import Launch
from ddm_ray.storage.manifest import NAME
from ddm_ray.storage.observer import LIST_SECONDS as MOST_LIST_SECONDS
from ddm_ray.storage.run import Run
from tests.storage.jobs import beat, fail, finish

GRACE = 60.0
FIRST, SECOND = Artifact("experts/000"), Artifact("experts/001")
ME = Presence("me/0001", beat=1)


class Eye:
    """An observer on an invented clock, with what others leave on storage."""

    def __init__(self, run: Run):
        self.run, self.now, self.beats = run, -1e6, 0
        self.board = Board(run, [*run.experts, ROUTER], GRACE, lambda artifact: 1000.0, lambda: self.now)

    def look(self, seconds: float = 0.0) -> View:
        self.now += seconds
        return self.board.look(ME)

    def presence(self, worker: str, **fields: object) -> None:
        """The next beat of another worker."""
        self.beats += 1
        island, _, number = worker.rpartition("/")
        note = json.dumps({"beat": self.beats, **fields}).encode()
        self.run.store.write(f"islands/{island}/workers/{number}/{PRESENCE}", note)

    def owner(self, artifact: Artifact, seconds: float = 0.0) -> str:
        return next(job.owner for job in self.look(seconds).jobs if job.artifact == artifact)


@pytest.fixture
def eye(partitioned: Run) -> Eye:
    return Eye(partitioned)


def test_what_nobody_has_begun_is_free(eye: Eye) -> None:
    view = eye.look()
    assert [job.artifact for job in view.jobs] == [*eye.run.experts, ROUTER]
    assert all(job.free and job.work == 1000.0 for job in view.jobs)
    assert [worker.id for worker in view.workers] == [ME.id]
    assert view.drained is None and view.ahead is None and not view.finished


def test_what_is_finished_is_no_job(eye: Eye) -> None:
    eye.look()
    for artifact in [*eye.run.experts, ROUTER]:
        finish(eye.run, artifact)
    eye.board.list_next()
    assert eye.look(1).finished


def test_what_its_inputs_miss_is_named(eye: Eye) -> None:
    eye.run.store.delete_one(f"{shard(0)}/{NAME}")
    first, second, *_ = eye.look().jobs
    assert (first.obstacle, second.obstacle) == (f"needs {shard(0)}, which isn't finished", "")


def test_the_worker_that_holds_it_owns_it_while_it_beats(eye: Eye) -> None:
    eye.presence("south/0003", holds=FIRST, speed=5.0)
    view = eye.look()
    assert view.jobs[0].owner == "south/0003" and view.jobs[1].free
    assert [(worker.id, worker.speed) for worker in view.workers] == [("south/0003", 5.0), (ME.id, None)]
    assert eye.owner(FIRST, GRACE) == "south/0003"
    eye.presence("south/0003", holds=FIRST, speed=5.0)
    assert eye.owner(FIRST, 1) == "south/0003"
    assert eye.owner(FIRST, GRACE + 1) == ""
    assert [worker.id for worker in eye.look().workers] == [ME.id]


def test_a_worker_that_has_ended_owns_nothing(eye: Eye) -> None:
    eye.presence("south/0003", holds=FIRST, ended=True)
    assert eye.owner(FIRST) == ""


def test_an_attempt_that_beats_owns_it_whoever_began_it(eye: Eye) -> None:
    attempt = claim(eye.run.store, FIRST)
    beat(attempt, 1, 10)
    assert eye.owner(FIRST) == "attempt 1"
    assert eye.owner(FIRST, GRACE - 1) == "attempt 1, silent for 59 s"
    beat(attempt, 2, 20)
    assert eye.owner(FIRST, 2) == "attempt 1"
    assert eye.owner(FIRST, GRACE + 1) == ""


def test_a_failed_attempt_owns_nothing_if_its_launch_tries_no_more(eye: Eye) -> None:
    attempt = claim(eye.run.store, FIRST)
    beat(attempt, 1, 10)
    fail(attempt, "a worker was lost")
    assert eye.owner(FIRST) == "attempt 1", "its launch is about to begin the next one"
    assert eye.owner(FIRST, GRACE + 1) == ""
    other = claim(eye.run.store, SECOND)
    fail(other, "its loss isn't finite", final=True)
    eye.board.list_next()
    assert eye.owner(SECOND) == ""


def test_slow_steps_are_waited_for(eye: Eye) -> None:
    beat(claim(eye.run.store, FIRST), 1, 10, steps_per_second=0.01)
    assert eye.owner(FIRST) and eye.owner(FIRST, 250)
    assert eye.owner(FIRST, 60) == ""


def test_what_its_worker_has_left_is_free_at_once(eye: Eye) -> None:
    launch = Launch(FIRST, island="south")
    attempt = claim(eye.run.store, FIRST, launch.claim_fields())
    beat(attempt, 1, 10)
    take = {"worker": "south/0001", "launch": launch.id}
    eye.run.store.write(take_key(FIRST, 1), json.dumps(take).encode())
    eye.presence("south/0001", holds=FIRST)
    assert eye.owner(FIRST) == "south/0001"
    eye.presence("south/0001", holds=SECOND)
    assert eye.owner(FIRST, 1) == "" and eye.owner(SECOND) == "south/0001"
    by_hand = claim(eye.run.store, FIRST, Launch(FIRST).claim_fields())
    beat(by_hand, 1, 10)
    eye.board.list_next()
    assert eye.owner(FIRST, 1) == "attempt 2", "that isn't the worker's"


@pytest.mark.parametrize("take", [b"", b"[]", b'{"worker": "../..", "launch": ""}', b'{"launch": 3}', b"{" * 70_000])
def test_a_take_that_no_worker_wrote_says_nothing(eye: Eye, take: bytes) -> None:
    eye.run.store.write(take_key(FIRST, 1), take)
    beat(claim(eye.run.store, FIRST), 1, 10)
    assert eye.owner(FIRST) == "attempt 1" and eye.board.takes(FIRST) == 1


def test_a_worker_without_room_holds_nothing_for_ever(eye: Eye) -> None:
    claim(eye.run.store, FIRST)
    for _ in range(30):
        eye.presence("south/0001", holds=FIRST)
        assert eye.owner(FIRST) == "south/0001"
        eye.now += ROOM_SECONDS / 30
    eye.presence("south/0001", holds=FIRST)
    assert eye.owner(FIRST, 60) == ""
    assert eye.board.look(replace(ME, holds=FIRST)).jobs[0].owner == ME.id, "one does wait for room of one's own"


def test_a_worker_that_is_crowded_holds_what_it_does_not_train_no_longer_than_the_grace(eye: Eye) -> None:
    claim(eye.run.store, FIRST)
    eye.presence("south/0001", holds=FIRST, crowded=True)
    assert eye.owner(FIRST) == eye.owner(FIRST, GRACE - 1) == "south/0001"
    eye.presence("south/0001", holds=FIRST, crowded=True)
    assert eye.owner(FIRST, 2) == ""


def test_a_job_that_was_lost_is_left_to_others_for_a_turn_after_its_newest_take(eye: Eye) -> None:
    turn = ROOM_SECONDS + 2 * GRACE + MOST_LIST_SECONDS
    eye.run.store.write(take_key(FIRST, 1), b"{}")
    eye.presence("south/0001")
    eye.look()
    eye.board.lose(FIRST)
    for number in (2, 3):
        eye.presence("south/0001")
        eye.look(turn - 1)
        assert eye.board.lost == frozenset({FIRST})
        eye.run.store.write(take_key(FIRST, number), b"{}")
        eye.board.list_next()
        eye.look()
    eye.presence("south/0001")
    eye.look(turn + 1)
    assert not eye.board.lost


def test_a_job_that_was_lost_is_left_to_nobody_where_nobody_else_lives(eye: Eye) -> None:
    eye.presence("south/0001")
    eye.look()
    eye.board.lose(FIRST)
    eye.look(GRACE - 1)
    assert eye.board.lost == frozenset({FIRST})
    eye.look(2)
    assert not eye.board.lost


def test_the_oldest_living_worker_of_an_island_works(eye: Eye) -> None:
    eye.presence("south/0001")
    eye.presence("south/0002")
    assert [worker.id for worker in eye.look().workers] == ["south/0001", ME.id]
    second = eye.board.look(Presence("me/0002", beat=1))
    assert second.ahead is None, "the first has no note"
    eye.presence("me/0001", host="n7")
    ahead = eye.board.look(Presence("me/0002", beat=1)).ahead
    assert ahead is not None and (ahead.id, ahead.host) == ("me/0001", "n7")
    eye.now += GRACE + 1
    assert eye.board.look(Presence("me/0002", beat=1)).ahead is None
    assert not eye.run.store.exists(f"islands/me/workers/0001/{PRESENCE}"), "nobody has to read it again"


def test_requests_to_drain_and_to_stop_are_seen(eye: Eye) -> None:
    stops.ask(eye.run.store, stops.drain_key("me"), "the room is cleaned")
    stops.ask(eye.run.store, stops.stop_key(FIRST), "its rows are wrong")
    view = eye.look()
    assert view.drained == "the room is cleaned"
    assert view.jobs[0].obstacle == "is stopped, its rows are wrong" and view.jobs[1].free
    assert stops.take_back(eye.run.store, stops.drain_key("me"))
    assert stops.take_back(eye.run.store, stops.stop_key(FIRST))
    eye.board.list_next()
    view = eye.look(1)
    assert view.drained is None and view.jobs[0].free


def test_a_take_of_what_was_silent_for_long_begins_anew(eye: Eye) -> None:
    """Else two islands would take it from each other for ever."""
    claim(eye.run.store, FIRST)
    assert eye.owner(FIRST) == "attempt 1"
    eye.presence("south/0001", holds=FIRST)
    eye.run.store.write(take_key(FIRST, 1), b"{}")
    eye.board.list_next()
    assert eye.owner(FIRST, 2 * ROOM_SECONDS) == "south/0001"
    eye.presence("south/0001", holds=FIRST)
    assert eye.owner(FIRST, ROOM_SECONDS / 2) == "south/0001"


def test_inputs_that_are_damaged_stop_no_other_job(eye: Eye) -> None:
    key = f"{shard(0)}/{NAME}"
    eye.run.store.write(key, eye.run.store.read(key)[:-20])
    first, second, *_ = eye.look().jobs
    assert first.obstacle.startswith(f"needs {shard(0)}, which is damaged: ") and second.free


def test_a_damaged_heartbeat_of_a_dead_attempt_is_no_obstacle_for_ever(eye: Eye) -> None:
    eye.run.store.write(f"{claim(eye.run.store, FIRST).prefix}/HEARTBEAT", b"{")
    assert "is damaged" in eye.look().jobs[0].obstacle
    assert eye.look(GRACE + 1).jobs[0].free


def test_what_may_not_be_deleted_ends_nobody(eye: Eye, monkeypatch: pytest.MonkeyPatch) -> None:
    eye.presence("me/0001")
    later = Presence("me/0002", beat=1)
    eye.board.look(later)

    def refuse(key: str) -> None:
        raise StorageError(f"{key}: denied", passes=False)

    monkeypatch.setattr(eye.run.store, "delete_one", refuse)
    eye.now += GRACE + 1
    assert eye.board.look(later).ahead is None
