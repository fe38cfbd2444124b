"""Islands that pull, as processes without Ray: they share a folder alone, and leave what one training alone leaves."""

from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from ddm_ray.islands.choose import MOVE_SECONDS
from ddm_ray.islands.worker_heartbeat import read_workers
from ddm_ray.jobs import stops
from ddm_ray.jobs.attempts import Attempt, claimed
from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.status import status
from ddm_ray.run.graph import MONOLITH, Artifact, trained_of
from ddm_ray.run.run import Run
from ddm_ray.train import local
from tests.conftest import wait_for
from tests.islands import island
from tests.processes import forked
from tests.random_run import make_data
from tests.train.results import checksums_of

pytestmark = pytest.mark.integration

SETTINGS = ("expert.train.steps=300", "expert.train.batch=8", "router.train.steps=300")
SETTINGS += ("router.train.batch=16",)
LEASE = 6.0
FIRST = Artifact("experts/000")


class Fleet:
    """Island processes at work on one run, and what they print."""

    def __init__(self, run: Run, folder: Path):
        self.run, self._folder = run, folder
        self.processes: dict[str, ForkServerProcess] = {}

    def start(self, *names: str, slower: float = 0.0, move_seconds: float = MOVE_SECONDS) -> None:
        for name in names:
            arguments = (self.run.url, name, LEASE, str(self._folder / f"{name}.log"), slower, move_seconds)
            self.processes[name] = forked().Process(target=island.main, args=arguments)
            self.processes[name].start()

    def printed(self) -> str:
        return "\n".join(log.read_text()[-3000:] for log in self._folder.glob("*.log"))

    def holders(self) -> dict[str, str]:
        """Artifact by worker, of those who say that they train one."""
        return {each.id: each.holds for each in read_workers(self.run.store) if each.holds and not each.ended}

    def trains(self, name: str) -> Artifact | None:
        """What the island trains, once its attempt has taken steps."""
        held = next((Artifact(held) for worker, held in self.holders().items() if worker.startswith(f"{name}/")), None)
        job = status(self.run, held).job if held else None
        return held if held and job and job.phase == "training" and job.value("loss") else None

    def wait(self, seconds: float = 240) -> None:
        """Wait until all of them have ended with 0."""
        for process in self.processes.values():
            process.join(seconds)
            assert process.exitcode == 0, self.printed()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    (folder := tmp_path / "logs").mkdir()
    fleet = Fleet(make_data(str(tmp_path / "run"), settings=SETTINGS), folder)
    yield fleet
    for process in fleet.processes.values():
        process.kill()
        process.join()


def artifacts(run: Run) -> list[Artifact]:
    return [each for each in trained_of(run.config) if each != MONOLITH]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checksums of the same run trained in one process, job after job."""
    run = make_data(str(tmp_path_factory.mktemp("alone") / "run"), settings=SETTINGS)
    process = forked().Process(target=local.train_locally, args=(run.url, artifacts(run)))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    return checksums_of(run, artifacts(run))


def test_three_islands_one_of_which_is_lost_for_good(fleet: Fleet, alone: dict[str, str]) -> None:
    fleet.start("north", "south", "west")
    wait_for(lambda: fleet.trains("south"), 120, fleet.printed)
    lost = fleet.trains("south")
    assert lost
    fleet.processes.pop("south").kill()
    fleet.wait()
    assert checksums_of(fleet.run, artifacts(fleet.run)) == alone
    attempts = claimed(fleet.run.store, lost)
    assert len(attempts) == 2, fleet.printed()
    islands = [Attempt(fleet.run.store, lost, number).claim().get("island") for number in attempts]
    assert islands[0] == "south" and islands[1] in ("north", "west")
    for artifact in artifacts(fleet.run):
        assert artifact == lost or claimed(fleet.run.store, artifact) == [1], f"{artifact} was trained once"


@pytest.mark.chaos
def test_a_fast_island_takes_over_from_a_slow_one_where_that_saved(fleet: Fleet, alone: dict[str, str]) -> None:
    fleet.start("slow", slower=0.1)
    wait_for(lambda: fleet.trains("slow"), 120, fleet.printed)
    moved = fleet.trains("slow")
    assert moved
    fleet.start("fast", move_seconds=0.1)
    fleet.wait()
    assert checksums_of(fleet.run, artifacts(fleet.run)) == alone
    first, second = (Attempt(fleet.run.store, moved, number) for number in claimed(fleet.run.store, moved))
    assert (first.claim()["island"], second.claim()["island"]) == ("slow", "fast")
    failure, beat = first.failure(), second.last_beat()
    assert failure and failure["kind"] == "Left" and "taken over by worker fast/0001" in failure["error"]
    assert f"step {beat['first']} is saved" in failure["error"], "no step is lost"
    assert f"fast takes {moved} over from slow/0001" in fleet.printed()


@pytest.mark.chaos
def test_drained_and_stopped_ones_save_and_others_go_on(fleet: Fleet, alone: dict[str, str]) -> None:
    store = fleet.run.store
    fleet.start("north")
    wait_for(lambda: fleet.trains("north"), 120, fleet.printed)
    left = fleet.trains("north")
    assert left
    stops.ask(store, stops.stop_key(left), "its rows are looked at")
    wait_for(lambda: fleet.trains("north") not in (None, left), 120, fleet.printed)
    stopped = status(fleet.run, left)
    assert "its rows are looked at" in describe(stopped) and stopped.job and stopped.job.saved, describe(stopped)
    other = fleet.trains("north")
    assert other
    stops.ask(store, stops.drain_key("north"), "the room is cleaned")
    fleet.wait()
    assert "north island north is drained: the room is cleaned" in fleet.printed()
    drained = status(fleet.run, other).job
    assert drained and drained.saved > 0
    assert stops.take_back(store, stops.stop_key(left))
    fleet.start("south")
    fleet.wait()
    assert checksums_of(fleet.run, artifacts(fleet.run)) == alone


@pytest.mark.chaos
def test_a_second_worker_of_an_island_stands_by(fleet: Fleet) -> None:
    fleet.start("north")
    wait_for(lambda: fleet.trains("north"), 120, fleet.printed)
    first = fleet.processes["north"]
    fleet.start("north")
    wait_for(lambda: "north waits: worker north/0001 of this island is at work" in fleet.printed(), 60, fleet.printed)
    assert set(fleet.holders()) == {"north/0001"}
    first.kill()
    first.join()
    wait_for(lambda: "north/0002" in fleet.holders(), 60, fleet.printed)
