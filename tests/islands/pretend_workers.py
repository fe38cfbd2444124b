"""Workers of islands, pretended: what one sees and chooses is the product's: board, observer, the rule, a take-over.

Each judges by its own clock, up to a day off.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from ddm_ray.errors import GaveUp, Stopped, Superseded
from ddm_ray.islands.choose import OpenJob, choose
from ddm_ray.islands.run_view import RunObserver
from ddm_ray.islands.takeover import TakeOver
from ddm_ray.islands.work import _Failures
from ddm_ray.islands.worker_heartbeat import HEARTBEAT, LEASE_SECONDS, WorkerState
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.stops import StopRequests, asked, drain_key
from ddm_ray.run.graph import Artifact
from tests.islands.pretend_storage import DAY, TICK, PretendRun, Training

BEAT, LOOK = LEASE_SECONDS / 6, 15.0


@dataclass(eq=False)
class Island:
    """What is so whichever worker is at work: its speed, FLOP/s, what it may take, at what it fails.

    Without `room` its cluster is full of others' jobs, or its nodes don't come: it waits for them, silently.
    """

    name: str
    speed: float
    only: frozenset[str] | None = None
    cursed: set[Artifact] = field(default_factory=set)
    room: bool = True
    workers: int = 0


@dataclass(frozen=True)
class Intent:
    """A job that a worker is about to take, and when it looked."""

    job: OpenJob
    looked: float

    @property
    def artifact(self) -> Artifact:
        return self.job.artifact


class Process:
    """A worker. Between what it sees and what it does a tick passes, in which others may do the same."""

    rule = staticmethod(choose)

    def __init__(
        self,
        island: Island,
        run: PretendRun,
        chance: random.Random,
        now: float,
        taken: Callable[["Process", Intent], None],
    ):
        island.workers += 1
        self.island, self.run, self.id = island, run, f"{island.name}/{island.workers:04d}"
        self._chance, self._taken, self._offset = chance, taken, chance.uniform(-DAY, DAY)
        self.ends = ""  # a fault to come: "taking" or "launching", right after its next
        self.frozen, self.gone, self.reason = False, False, ""
        self.ahead, self.born, self.woke = "", now, now
        self.known_speed: float | None = None
        self.training: Training | None = None
        self.moves = 0
        self._failures = _Failures()
        self.restricted = island.only is not None
        self._board = RunObserver(run, list(island.only or run.works), run.works.__getitem__, lambda: self._own)
        self._own = self._next_beat = self._next_look = -inf
        self._intent: Intent | None = None
        self._beat, self._ready = 0, 0.0
        self._taking: tuple[Launch, TakeOver] | None = None

    @property
    def awake(self) -> bool:
        return not self.frozen and not self.gone

    def freeze(self) -> None:
        self.frozen = True
        if self.training:
            self.training.stalled = True

    def step(self, now: float) -> None:
        """A tick of its life."""
        if not self.awake:
            return
        self._own = now + self._offset
        if self.training:
            self.training.clock = self._own
            self._train(now)
        elif self._taking:
            self._begin(now)
        elif self._intent:
            self._take(self._intent, now)
        if self._own >= self._next_beat:
            self._speak()
        if self._own >= self._next_look and not self.gone:
            self._next_look = self._own + LOOK
            if self.training:
                self._stand(self.training)
            elif not self._taking:
                self._look(now)

    def _train(self, now: float) -> None:
        training, artifact = self.training, self.training.artifact
        if training.attempt is None:
            if self.island.room and self._own >= self._ready:
                training.begin(self._own, now)
        elif artifact in self.island.cursed:
            if training.fail(final=self._chance.random() < 0.5):
                self._failures.add(artifact, GaveUp("no luck"), self._own)
                self._release()
        elif training.train(self.island.speed):
            self._release()
        else:
            self.known_speed = self.island.speed * self._chance.uniform(0.9, 1.1)

    def _release(self) -> None:
        self.training = None
        self._next_look = -inf
        self._board.list_next()
        self._speak()

    def _take(self, intent: Intent, now: float) -> None:
        self._intent = None
        artifact = intent.artifact
        millis = int(1000 * (self._own + 2 * DAY))
        launch = Launch(artifact, f"{millis:011x}{self._chance.getrandbits(32):08x}", self.island.name)
        self._speak(artifact)
        before = self._board.newest_take(artifact)
        if not self.run.take(artifact, self._board.takes(artifact) + 1, self.id, launch):
            self._release()
            return
        self._taken(self, intent)
        self.gone = self.ends == "taking"
        if not self.gone:
            self._taking = (
                launch,
                TakeOver(
                    self.run,
                    intent.job.artifact,
                    f"worker {self.id}",
                    bool(intent.job.holder),
                    before,
                    lambda: self._own,
                ),
            )
            self.moves += bool(intent.job.holder)
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Launch what was taken, once the launch before it has ended."""
        launch, take_over = self._taking
        if error := StopRequests(self.run.store, launch.artifact, launch).look():
            self._failures.add(launch.artifact, error, self._own)
            self._taking = None
            self._release()
            return
        if not take_over.done:
            return
        self._taking = None
        self.training = Training(self.run, launch, now)
        self._ready = self._own + TICK * self._chance.randrange(4)
        self.gone = self.ends == "launching"

    def _note(self, holds: str = "") -> dict[str, object]:
        if self.training or self._taking:
            holds = self.training.artifact if self.training else self._taking[0].artifact
        return {"beat": self._beat, "holds": holds, "speed": self.known_speed, "ended": self.gone}

    def _speak(self, holds: str = "") -> None:
        self._next_beat, self._beat = self._own + BEAT, self._beat + 1
        island, _, number = self.id.rpartition("/")
        note = json.dumps(self._note(holds)).encode()
        self.run.store.write(f"islands/{island}/workers/{number}/{HEARTBEAT}", note)

    def _stand(self, training: Training) -> None:
        """End the training where it is to end, or another has its place; as attempts and launches do by themselves."""
        store, artifact = self.run.store, training.artifact
        drained = asked(store, drain_key(self.island.name))
        error = Stopped(f"drained: {drained}") if drained else StopRequests(store, artifact, training.launch).look()
        if artifact in self.run.committed:
            error = Superseded("it is done")
        elif training.fence and (newer := training.fence.look()) and newer.lives is not None:
            if not newer.lives:
                training.attempt = training.fence = None
            else:
                error = newer.error(0, training.launch.id)
        if error:
            if isinstance(error, Stopped):
                training.save()
            if error.passes and training.attempt is None and artifact not in self.run.committed:
                self._failures.add(artifact, error, self._own)
            training.end(error)
            self._release()

    def _look(self, now: float) -> None:
        view = self._board.look(WorkerState(id=self.id, **self._note()))
        self.ahead = view.ahead.id if view.ahead else ""
        if view.finished or view.drained is not None:
            self.gone = True
            self._speak()
        elif self.ahead:
            self.reason = f"stands by {self.ahead}"
        else:
            choice = self.rule(view.jobs, view.workers, self.id, self._failures.now(self._own))
            self.reason = choice.reason
            assert (choice.take is None) == bool(choice.reason)
            if choice.take is not None:
                self._intent = Intent(choice.take, now)


class Liar(Process):
    """One that is there, says that it is fast, or nonsense, and never takes anything."""

    def step(self, now: float) -> None:
        self._own, self.known_speed = now + self._offset, self.island.speed
        if self._own >= self._next_beat:
            self._speak()
