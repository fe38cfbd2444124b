"""What can go wrong while experts train on a Ray cluster, and what makes it so: on real processes and real files."""

import json
import os
import random
import resource
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ddm_ray.errors import CorruptArtifact
from ddm_ray.jobs.attempts import claimed, heartbeat
from ddm_ray.run.graph import expert
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from tests.conftest import BIN, wait_for
from tests.processes import began, family
from tests.train.ray.nodes import Node, Nodes

REFUSED_BYTES = 2**14


class Fault(Enum):
    """What can go wrong while an expert trains."""

    WORKER_KILLED = "SIGKILL of a training worker"
    WORKER_STOPPED = "SIGSTOP of a training worker"
    NODE_KILLED = "SIGKILL of a node, and another one comes"
    DRIVER_KILLED = "SIGKILL of ddm train, and the same command again"
    ALL_KILLED = "SIGKILL of all that an expert has, ddm train and its nodes; then other nodes, and the same command"
    HEAD_KILLED = "SIGKILL of the head, and another Ray cluster"
    STATE_CUT = "SIGKILL of a training worker that writes a state"
    STATE_ALTERED = "a file of the newest state altered, then SIGKILL of a training worker"
    STORAGE_REFUSES = "storage that refuses a training worker's states, then SIGKILL of it"
    SECOND_LAUNCH = "the same expert launched a second time"


@dataclass(frozen=True)
class SavedName:
    """A state by its attempt's number and its name there."""

    number: int
    name: str


@dataclass
class Training:
    """One expert that `ddm train` trains on a slice: `nodes`, which have `room` for so many workers each.

    `log`: what `ddm train` prints.
    """

    run: Run
    index: int
    cluster: Nodes
    islands: Path
    island: str
    resource: str
    log: Path
    nodes: list[Node]
    drivers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    room: int = 1

    @property
    def artifact(self) -> str:
        return expert(self.index)

    def log_tail(self) -> str:
        """The end of what its `ddm train` printed."""
        return self.log.read_text()[-3000:]

    def add_node(self) -> None:
        """One more node of the slice."""
        self.nodes.append(self.cluster.add(self.resource, self.room))

    def launch(self, island: str | None = None) -> None:
        """`ddm train`, which goes on where others ended; on another island, if it is named."""
        arguments = ["train", self.run.url, "expert", str(self.index), "--address", self.cluster.address]
        arguments += ["--islands", str(self.islands), "--island", island or self.island]
        command, environment = [str(BIN / "ddm"), *arguments], self.cluster.environment
        with self.log.open("ab") as sink:
            self.drivers.append(
                subprocess.Popen(command, stdout=sink, stderr=sink, env=environment, start_new_session=True)
            )

    def launch_elsewhere(self, island: str) -> None:
        """`ddm train` on an island that stands for another machine: it can't ask whether the first command lives."""
        for record in Path(self.run.url, self.artifact).glob("launches/*/BEGUN-*"):
            record.write_text(json.dumps({**json.loads(record.read_bytes()), "processes": "another boot"}))
        self.launch(island)

    def overtake(self, island: str) -> None:
        """Freeze its workers, which have saved a state, until another island has taken over and saved one, too."""
        frozen = [pid for worker in self.workers() for pid in reversed(family(worker))]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        self.launch_elsewhere(island)
        self.wait_for_state(2)
        for pid in frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def workers(self) -> list[int]:
        """Processes that train this expert, rank 0 first, by its heartbeat."""
        beat = self.beat()
        pids = [pid for node in self.nodes for pid in node.trainers()]
        # Those of the attempt before, which may still be ending, are older.
        newest = sorted(pids, key=began)[-beat.get("world_size", len(pids)) :]
        return sorted(newest, key=lambda pid: pid != beat.get("pid"))

    def beat(self) -> dict:
        """The newest heartbeat: attempt, step and so on; empty without one."""
        with suppress(CorruptArtifact):
            return heartbeat(self.run.store, self.artifact) or {}
        return {}

    def place(self) -> tuple[int, int]:
        """The newest attempt that told anything, and its step."""
        beat = self.beat()
        return beat.get("attempt", 0), beat.get("step", 0)

    def attempts(self) -> list[int]:
        return claimed(self.run.store, self.artifact)

    def states(self, committed: bool = True) -> list[SavedName]:
        """Its states, the best last; or those that are being written."""
        names = self.run.store.sizes(f"{self.artifact}/attempts")
        parts = sorted({tuple(name.split("/")[:3]) for name in names if name.count("/") > 2})
        states = [SavedName(int(part[0]), part[2]) for part in parts if part[1] == "state"]
        return [each for each in states if (f"{each.number:04d}/state/{each.name}/{NAME}" in names) is committed]

    def finished(self) -> bool:
        return self.run.manifest(self.artifact) is not None

    def wait_for_step(self, after: tuple[int, int], seconds: float = 180) -> None:
        """Wait until a later attempt than `after`'s has done a step beyond, or all is finished."""
        wait_for(lambda: self.finished() or self._is_beyond(after), seconds, self.log_tail)

    def _is_beyond(self, after: tuple[int, int]) -> bool:
        beat = self.beat()
        done = beat.get("phase") == "training" and beat.get("step", 0) > beat.get("first", 0)
        return done and beat["attempt"] > after[0]

    def wait_for_state(self, attempt: int = 1, seconds: float = 180) -> None:
        """Wait until this attempt, or a later one, has committed a state."""
        wait_for(lambda: any(state.number >= attempt for state in self.states()), seconds, self.log_tail)

    def wait_until_finished(self, seconds: float = 300) -> None:
        """Wait for the artifact; `ddm train` takes a while longer to end."""
        wait_for(self.finished, seconds, self.log_tail)

    def wait_for_drivers(self) -> None:
        """Wait for all `ddm train` that wasn't killed to end well; one may have been overtaken by another."""
        for driver in self.drivers:
            overtaken = {1} if "has overtaken it" in self.log_tail() else set()
            assert driver.wait(90) in {0, -signal.SIGKILL} | overtaken, self.log_tail()

    def lost_steps(self, attempt: int) -> int:
        """Steps that an attempt told of and the next one, which has begun, did again."""
        before, after = (
            json.loads(self.run.store.read(f"{self.artifact}/attempts/{number:04d}/HEARTBEAT"))
            for number in (attempt, attempt + 1)
        )
        return max(0, before["step"] - after["first"])

    def stop(self) -> None:
        """Kill its `ddm train`, whatever it is about."""
        for driver in self.drivers:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()


def inject(fault: Fault, training: Training, chance: random.Random) -> None:
    """Make it go wrong now, and replace what would be replaced by whoever runs the machines."""
    INJECTORS[fault](training, chance)


def send(training: Training, chance: random.Random, what: signal.Signals) -> None:
    """A signal to one of its workers, if it has any at the moment."""
    if workers := training.workers():
        with suppress(ProcessLookupError):
            os.kill(chance.choice(workers), what)


def kill_worker(training: Training, chance: random.Random) -> None:
    send(training, chance, signal.SIGKILL)


def stop_worker(training: Training, chance: random.Random) -> None:
    send(training, chance, signal.SIGSTOP)


def kill_node(training: Training, chance: random.Random) -> None:
    node = chance.choice([node for node in training.nodes if node.trainers()] or training.nodes)
    training.nodes.remove(node)
    node.kill()
    training.add_node()


def kill_driver(training: Training, chance: random.Random) -> None:
    training.stop()
    training.launch()


def kill_all(training: Training, chance: random.Random) -> None:
    training.stop()
    lost = training.nodes[:]
    training.nodes.clear()
    training.drivers.clear()
    for node in lost:
        node.kill()
    for _ in lost:
        training.add_node()
    training.launch()


def cut_state(training: Training, chance: random.Random) -> None:
    """Killed once files of a state are there and its manifest isn't; one that never saves is killed all the same."""
    with suppress(AssertionError):
        wait_for(lambda: training.states(committed=False), 10, every=0.001)
    send(training, chance, signal.SIGKILL)


def alter_state(training: Training, chance: random.Random) -> None:
    store = training.run.store
    if states := training.states():
        folder = f"{training.artifact}/attempts/{states[-1].number:04d}/state/{states[-1].name}"
        with suppress(FileNotFoundError, IndexError):  # dropped meanwhile
            key = f"{folder}/{chance.choice([*store.sizes(folder)])}"
            store.write(key, flipped(store.read(key), chance))
    send(training, chance, signal.SIGKILL)


def flipped(data: bytes, chance: random.Random) -> bytes:
    """The bytes with one bit altered."""
    altered = bytearray(data)
    altered[chance.randrange(len(altered))] ^= 1 << chance.randrange(8)
    return bytes(altered)


def refuse_storage(training: Training, chance: random.Random) -> None:
    """The operating system refuses files above some KiB: states, not heartbeats. It ends with the process."""
    for pid in training.workers():
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (REFUSED_BYTES, REFUSED_BYTES))
    place = training.place()
    with suppress(AssertionError):
        wait_for(lambda: training.place() != place, 10)
    send(training, chance, signal.SIGKILL)


def launch_again(training: Training, chance: random.Random) -> None:
    training.launch()


INJECTORS: dict[Fault, Callable[[Training, random.Random], None]] = {
    Fault.WORKER_KILLED: kill_worker,
    Fault.WORKER_STOPPED: stop_worker,
    Fault.NODE_KILLED: kill_node,
    Fault.DRIVER_KILLED: kill_driver,
    Fault.ALL_KILLED: kill_all,
    Fault.STATE_CUT: cut_state,
    Fault.STATE_ALTERED: alter_state,
    Fault.STORAGE_REFUSES: refuse_storage,
    Fault.SECOND_LAUNCH: launch_again,
}
