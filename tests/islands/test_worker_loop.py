"""An island's loop by itself, with trainings that take no time: what ends it, what it outlives, what it asks for."""

import json
from collections.abc import Callable, Iterator
from threading import Timer

import pytest

from ddm_ray.errors import GaveUp, RayAway, StorageError, TrainingError
from ddm_ray.islands import run_view, work
from ddm_ray.islands.run_view import RunObserver, take_key
from ddm_ray.islands.work import IslandWorker
from ddm_ray.islands.worker_heartbeat import WorkerHeartbeat
from ddm_ray.jobs import stops
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.status import Status, status
from ddm_ray.run.graph import ROUTER, STUDENT, Artifact
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from tests.jobs.attempts import beat, fail, finish

Train = Callable[[Run, Launch, Callable[[list[Status]], None]], None]
FIRST = Artifact("experts/000")


@pytest.fixture
def heartbeat(partitioned: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerHeartbeat]:
    for name in ("IDLE_SECONDS", "PAID_IDLE_SECONDS", "LOOK_SECONDS", "AGAIN_SECONDS"):
        monkeypatch.setattr(work, name, 0.01)
    with WorkerHeartbeat(partitioned.store, "north") as heartbeat:
        yield heartbeat


def worker(run: Run, heartbeat: WorkerHeartbeat, train: Train, printed: list[str]) -> IslandWorker:
    looks = RunObserver(run, [*run.experts, ROUTER], lambda artifact: 1000.0)
    return IslandWorker(run, heartbeat, looks, train, lambda statuses, doing: printed.append(doing))


def test_it_takes_one_after_another_and_ends(partitioned: Run, heartbeat: WorkerHeartbeat) -> None:
    trained: list[str] = []

    def train(run: Run, launch: Launch, watch: object) -> None:
        assert launch.island == "north" and run.store.exists(take_key(launch.artifact, 1))
        assert heartbeat.state.holds == launch.artifact
        trained.append(launch.artifact)
        finish(run, launch.artifact)

    assert worker(partitioned, heartbeat, train, []).run_to_end() == "all is finished"
    assert sorted(trained) == sorted([*partitioned.experts, ROUTER])


def test_a_routers_training_tells_no_speed(partitioned: Run, heartbeat: WorkerHeartbeat) -> None:
    def train(run: Run, launch: Launch, watch: Callable[[list[Status]], None]) -> None:
        attempt = claim(run.store, launch.artifact, launch.claim_fields())
        beat(attempt, 1, 10, flops_per_second=1e6 if launch.artifact == ROUTER else 7e9)
        watch([status(run, launch.artifact)])
        assert heartbeat.state.speed == (None if launch.artifact == ROUTER else 7e9)
        finish(run, launch.artifact)

    for artifacts in ([ROUTER], [FIRST]):
        looks = RunObserver(partitioned, artifacts, lambda artifact: 1000.0)
        IslandWorker(partitioned, heartbeat, looks, train, lambda *_: None).run_to_end()
    assert heartbeat.state.speed == 7e9


def test_what_no_ray_is_here_for_is_left_to_others(partitioned: Run, heartbeat: WorkerHeartbeat) -> None:
    def require_room() -> None:
        raise RayAway("no Ray to join")

    looks = RunObserver(partitioned, [*partitioned.experts, ROUTER], lambda artifact: 1000.0)
    idle = IslandWorker(partitioned, heartbeat, looks, lambda *_: pytest.fail("taken"), lambda *_: None, require_room)
    with pytest.raises(RayAway, match="no Ray to join"):
        idle.run_to_end()
    assert not [each for each in partitioned.experts if partitioned.store.exists(take_key(each, 1))]


def test_a_student_is_taken_once_its_teachers_are_finished(
    partitioned: Run, heartbeat: WorkerHeartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the island says what it waits for, and leaves nothing on storage."""
    monkeypatch.setattr(run_view, "LACK_SECONDS", 0.01)
    printed, trained = list[str](), list[str]()

    def report(statuses: list[Status], doing: str) -> None:
        printed.append(doing)
        left = [each for each in partitioned.experts if not partitioned.manifest(each)]
        if len(printed) % 3 == 0 and left:
            assert not partitioned.store.sizes(STUDENT)
            finish(partitioned, left[0])

    def train(run: Run, launch: Launch, watch: object) -> None:
        trained.append(launch.artifact)
        finish(run, launch.artifact)

    looks = RunObserver(partitioned, [STUDENT], lambda _: 1000.0)
    assert IslandWorker(partitioned, heartbeat, looks, train, report).run_to_end() == "all is finished"
    assert trained == [STUDENT]
    assert printed[0] == f"waits: {STUDENT}: needs {partitioned.experts[0]}, which isn't finished"
    assert printed[3] == f"waits: {STUDENT}: needs {partitioned.experts[1]}, which isn't finished"


def test_a_job_that_was_taken_over_before_it_began_is_left_for_a_while(
    partitioned: Run, heartbeat: WorkerHeartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two without room would pass it to and fro."""
    monkeypatch.setattr(work, "AGAIN_SECONDS", 600.0)
    printed: list[str] = []

    def train(run: Run, launch: Launch, watch: Callable[[list[Status]], None]) -> None:
        if launch.artifact != FIRST:
            finish(run, launch.artifact)
            return
        stops.ask(run.store, stops.launch_stop_key(launch), "taken over by worker south/0001")
        monkeypatch.setattr(work, "LOOK_SECONDS", 0.0)
        while True:  # until it looks
            watch([status(run, FIRST)])

    def report(statuses: list[Status], doing: str) -> None:
        printed.append(doing)
        if doing.startswith("waits: "):
            finish(partitioned, FIRST)
            looks.list_next()

    looks = RunObserver(partitioned, [*partitioned.experts, ROUTER], lambda artifact: 1000.0)
    assert IslandWorker(partitioned, heartbeat, looks, train, report).run_to_end() == "all is finished"
    assert f"leaves {FIRST}: {FIRST} is left, taken over by worker south/0001" in printed
    assert sum(doing == f"takes {FIRST}" for doing in printed) == 1


def test_a_job_that_was_stopped_before_it_began_is_taken_again_once_that_is_allowed(
    partitioned: Run, heartbeat: WorkerHeartbeat
) -> None:
    printed: list[str] = []
    tries = 0

    def train(run: Run, launch: Launch, watch: Callable[[list[Status]], None]) -> None:
        nonlocal tries
        tries += launch.artifact == FIRST
        if launch.artifact == FIRST and tries == 1:
            stops.ask(run.store, stops.stop_key(FIRST), "its rows are wrong")
            while True:  # until it looks
                watch([status(run, FIRST)])
        finish(run, launch.artifact)

    def report(statuses: list[Status], doing: str) -> None:
        printed.append(doing)
        if doing.startswith("waits: "):
            stops.take_back(partitioned.store, stops.stop_key(FIRST))
            looks.list_next()

    looks = RunObserver(partitioned, [*partitioned.experts, ROUTER], lambda artifact: 1000.0)
    assert IslandWorker(partitioned, heartbeat, looks, train, report).run_to_end() == "all is finished"
    assert tries == 2 and any("its rows are wrong" in doing for doing in printed)


def test_a_job_is_taken_over_once_its_slow_holder_has_saved_and_ended(
    partitioned: Run, heartbeat: WorkerHeartbeat
) -> None:
    """The holder's launch is asked to end; the new one begins after that."""
    store, events = partitioned.store, list[str]()
    heartbeat.update(speed=50.0)
    for artifact in (*partitioned.experts[1:], ROUTER):
        finish(partitioned, artifact)
    slow = Launch(FIRST, island="south")
    store.write(slow.begun_key, b"{}")
    attempt = claim(store, FIRST, slow.claim_fields())
    beat(attempt, 1, 10, 1000, steps_per_second=0.1)
    store.write("islands/south/workers/0001/PRESENCE", json.dumps({"beat": 1, "holds": FIRST, "speed": 1.0}).encode())
    store.write(take_key(FIRST, 1), json.dumps({"worker": "south/0001", "launch": slow.id}).encode())

    class Asked(Store):
        """The holder: it ends once it is asked to."""

        def create(self, key: str, data: bytes) -> bool:
            created = super().create(key, data)
            if key == stops.launch_stop_key(slow):
                events.append(f"asked: {stops.asked(store, key)}")
                Timer(
                    0.3, lambda: (events.append("ended"), attempt.fail({"error": "saved", "kind": "Stopped"}))
                ).start()
            return created

    def train(run: Run, launch: Launch, watch: object) -> None:
        events.append(f"trains after attempt {launch.after}")
        finish(run, launch.artifact)

    partitioned.store = Asked(store.url)
    looks = RunObserver(partitioned, [*partitioned.experts, ROUTER], lambda artifact: 1000.0)
    printed: list[str] = []
    worker = IslandWorker(partitioned, heartbeat, looks, train, lambda _, doing: printed.append(doing))
    assert worker.run_to_end() == "all is finished"
    assert events == ["asked: taken over by worker north/0001", "ended", "trains after attempt 1"]
    assert f"takes {FIRST} over from south/0001" in printed


def test_what_may_pass_is_tried_again_and_what_may_not_ends_it(partitioned: Run, heartbeat: WorkerHeartbeat) -> None:
    """Whoever else is at work: it can do nothing here."""
    tries: dict[str, int] = {}
    partitioned.store.write("islands/south/workers/0001/PRESENCE", b'{"beat": 1}')

    def train(run: Run, launch: Launch, watch: object) -> None:
        tries[launch.artifact] = tries.get(launch.artifact, 0) + 1
        attempt = claim(run.store, launch.artifact, launch.claim_fields())
        if launch.artifact == FIRST and tries[FIRST] == 3:
            finish(run, FIRST)
            return
        kind = GaveUp if launch.artifact == FIRST else TrainingError
        fail(attempt, "no luck", final=kind is TrainingError)
        raise kind(f"{launch.artifact}: no luck")

    with pytest.raises(TrainingError, match="no luck"):
        worker(partitioned, heartbeat, train, printed := []).run_to_end()
    assert tries == {FIRST: 3} | dict.fromkeys((*partitioned.experts[1:], ROUTER), 1), printed


def test_storage_that_is_away_is_waited_for(
    partitioned: Run, heartbeat: WorkerHeartbeat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for artifact in (*partitioned.experts, ROUTER):
        finish(partitioned, artifact)
    looks: list[int] = []
    sizes = partitioned.store.sizes

    def refuse(prefix: str) -> object:
        looks.append(1)
        if len(looks) <= 3:
            raise StorageError("s3://lab: away")
        return sizes(prefix)

    monkeypatch.setattr(partitioned.store, "sizes", refuse)
    assert worker(partitioned, heartbeat, lambda *_: None, []).run_to_end() == "all is finished"
    assert capsys.readouterr().err.count("storage can't be asked, trying on: s3://lab: away") == 1


def test_a_request_to_leave_that_storage_refuses_is_made_again(partitioned: Run, heartbeat: WorkerHeartbeat) -> None:
    store, refused = partitioned.store, [StorageError("denied")]
    stops.ask(store, stops.drain_key("north"), "moving day")
    launch = Launch(FIRST, island="north")
    beat(claim(store, FIRST, launch.claim_fields()), 1, 10)
    stopper = work._Stopper(store, launch, lambda: False)
    create = store.create

    def deny(key: str, data: bytes) -> bool:
        if refused:
            raise refused.pop()
        return create(key, data)

    store.create = deny  # type: ignore[method-assign]
    known = status(partitioned, FIRST)
    with pytest.raises(StorageError):
        look(stopper, known)
    look(stopper, known)
    assert stops.asked(store, stops.launch_stop_key(launch)) == "moving day"


def look(stopper: "work._Stopper", known: Status) -> None:
    """A look that is due."""
    stopper._looked -= 100
    stopper.look(known)
