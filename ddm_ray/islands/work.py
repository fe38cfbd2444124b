"""An island's own loop: look at storage, take what is to be trained, train it, look again, until all is finished."""

import json
import math
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ddm_ray.errors import DDMError, RayError, Stopped, StorageError, Superseded
from ddm_ray.islands.board import Board, View, take_key
from ddm_ray.islands.presence import PresenceKeeper
from ddm_ray.islands.promises import Promises
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.launches import Launch, noted
from ddm_ray.storage.run import Run
from ddm_ray.storage.status import Status
from ddm_ray.storage.stops import StopRequests, ask, asked, drain_key, launch_stop_key
from ddm_ray.storage.store import Store
from ddm_ray.storage.succession import LOOK_SECONDS

GRACE_SECONDS = 60.0
"""Silence, by a worker's own clock, after which it takes what another one held."""
IDLE_SECONDS, PAID_IDLE_SECONDS = 2.0, 10.0
"""Pause between the looks of a worker that waits, on a disk and where each look is paid for."""
AGAIN_SECONDS, MAX_AGAIN_SECONDS = 30.0, 600.0
"""Time after which a worker tries again what it gave up in the hope that it passes, at first and at most."""
CROWDED_SECONDS = 60.0
"""Time for which others' jobs must have filled its Ray cluster until a worker says so of what it holds."""

_TIME = re.compile(r", in \d[\d.]* \w+|, \d[\d.]* \w+ left")  # each change of a note is a request

Train = Callable[[Run, Launch, Callable[[list[Status]], None]], None]
"""Trains a launch's artifact to its commit, and calls back with its statuses; raises DDMError where it gives up."""
Report = Callable[[list[Status], str], None]


class Untrained(Superseded):
    """A job that another worker has taken, since nothing trained it here: Ray had no room, or its nodes are gone."""


@dataclass
class _Failures:
    """Errors of this worker by artifact, and until when, by its clock, it doesn't try again; infinite: never."""

    errors: dict[Artifact, DDMError] = field(default_factory=dict)
    until: dict[Artifact, float] = field(default_factory=dict)
    _pauses: dict[Artifact, float] = field(default_factory=dict)

    def add(self, artifact: Artifact, error: DDMError, now: float) -> None:
        """Count one more failure."""
        pause = min(MAX_AGAIN_SECONDS, 2 * self._pauses.get(artifact, AGAIN_SECONDS / 2))
        self._pauses[artifact] = pause
        self.errors[artifact] = error
        self.until[artifact] = now + pause if error.passes else math.inf

    def now(self, now: float) -> frozenset[Artifact]:
        """Artifacts that aren't tried now."""
        return frozenset(artifact for artifact, until in self.until.items() if now < until)

    def final(self, artifacts: list[Artifact]) -> DDMError | None:
        """The first error, if all of these have failed for good here; None: not all, or none at all."""
        if not artifacts or any(self.until.get(artifact) != math.inf for artifact in artifacts):
            return None
        return self.errors[artifacts[0]]


class Crowd:
    """For how long others' jobs have filled the Ray cluster, by readings of one's own clock."""

    def __init__(self) -> None:
        self._since: float | None = None

    def lasts(self, full: bool, now: float) -> bool:
        """True once it has been `full` for CROWDED_SECONDS, at each look."""
        self._since = (now if self._since is None else self._since) if full else None
        return self._since is not None and now - self._since >= CROWDED_SECONDS


class IslandWorker:
    """Works for one island on one run; `run_to_end` does it.

    `train` trains an artifact. `report` is told by each look of all statuses, and in words of what the worker does.
    `require_room` raises RayError where nothing could be trained here now; it is asked before each take. `full` says,
    while it has a job that nothing trains, that others' jobs fill its Ray cluster. `leaving` says that this process is
    to end: what it trains is saved first. `job` is the Ray job that it is, or "".
    """

    def __init__(
        self,
        run: Run,
        keeper: PresenceKeeper,
        board: Board,
        train: Train,
        report: Report,
        require_room: Callable[[], None] = lambda: None,
        full: Callable[[], bool] = lambda: False,
        leaving: Callable[[], bool] = lambda: False,
        job: str = "",
        grace: float = GRACE_SECONDS,
    ):
        self._run, self._keeper, self._board, self._train = run, keeper, board, train
        self._report, self._require_room = report, require_room
        self._full, self._leaving, self._job = full, leaving, job
        self._failures, self._promises = _Failures(), Promises(grace)
        self._island = keeper.presence.island
        self._idle = IDLE_SECONDS if run.store.local else PAID_IDLE_SECONDS

    def run_to_end(self) -> str:
        """Work until the run is finished, the island drained or the process asked to leave; words on which.

        Raises RayError for a Ray cluster that is gone, or hasn't what the placement asks for; and the first error where
        all that is left failed here for good, and nobody else is at work.
        """
        while (view := self._look()) is not None:
            if view.finished:
                return "all is finished"
            if view.drained is not None:
                return f"island {self._island} is drained: {view.drained}"
            if self._leaving():
                break
            self._act(view)
        return "asked to leave"

    def _look(self) -> View | None:
        """The run as it is, once storage can be asked; None if the process is to leave before."""
        warned = False
        while True:
            try:
                self._keeper.tell(failed=sorted(self._failures.now(time.monotonic()) | self._board.lost))
                return self._board.look(self._keeper.presence)
            except (StorageError, OSError) as error:
                if isinstance(error, StorageError) and not error.passes:
                    raise
                if not warned:
                    print(f"warning: storage can't be asked, trying on: {error}", file=sys.stderr)
                warned = True
            if self._leaving():
                return None
            time.sleep(self._idle)

    def _act(self, view: View) -> None:
        """Train something, or wait for the time until the next look."""
        if view.ahead:
            where = " ".join(filter(None, (view.ahead.host, view.ahead.job)))
            self._wait(view, f"worker {view.ahead.id} of this island is at work on {where}")
            return
        choice = self._promises.choose(view.jobs, view.workers, self._keeper.id, time.monotonic())
        if choice.take is not None:
            self._require_room()
            self._take(view, choice.take)
            return
        possible = [job for job in view.jobs if not job.obstacle]
        error = self._failures.final([job.artifact for job in possible])
        if error and not any(job.owner for job in possible):
            raise error  # others may go on: nothing is left that this island could do
        self._wait(view, choice.reason + (f"; failed here: {error}" if error else ""))

    def _wait(self, view: View, reason: str) -> None:
        with suppress(StorageError):
            self._keeper.tell(holds="", waits=_TIME.sub("", reason))
        self._report(view.statuses, f"waits: {reason}")
        time.sleep(self._idle)

    def _take(self, view: View, artifact: Artifact) -> None:
        """Train the artifact, unless another worker has taken it first."""
        store = self._run.store
        begun = Launch(artifact, island=self._island, job=self._job)
        try:
            # Before the take: whoever lists that reads this afterwards.
            self._keeper.tell(holds=artifact, waits="")
            number = self._board.takes(artifact) + 1
            take = json.dumps({"worker": self._keeper.id, "launch": begun.id}).encode()
            if not store.create(take_key(artifact, number), take):
                return
            self._report(view.statuses, f"takes {artifact}")
            with noted(store, begun) as launch:
                stopper = _Stopper(store, launch, take_key(artifact, number + 1), self._leaving)
                self._train(self._run, launch, partial(self._watch, stopper, Crowd()))
            self._report(view.statuses, f"{artifact} is finished")
        except RayError:
            raise
        except Untrained as error:
            self._board.lose(artifact)
            self._report(view.statuses, f"leaves {artifact}: {error}")
        except (Stopped, Superseded) as error:
            self._report(view.statuses, f"leaves {artifact}: {error}")
            time.sleep(self._idle)
        except DDMError as error:
            self._failures.add(artifact, error, time.monotonic())
            self._report(view.statuses, f"gives up {artifact}: {error}")
        finally:
            self._board.list_next()
            with suppress(StorageError):
                self._keeper.tell(holds="", crowded=False)

    def _watch(self, stopper: "_Stopper", crowd: Crowd, statuses: list[Status]) -> None:
        (known,) = statuses
        job = known.job if known.state == "begun" else None
        # A router is light: it is trained at few FLOP/s where an expert is trained at many.
        if job and known.artifact.kind != "router" and (flops := job.value("flops_per_second")):
            self._keeper.tell(speed=float(f"{flops:.1g}"))  # roughly: each change is a request
        self._report(statuses, f"trains {known.artifact}")
        if (trained := stopper.look(known)) is not None:
            self._keeper.tell(crowded=crowd.lasts(not trained and self._full(), time.monotonic()))


class _Stopper:
    """Ends a launch that is to leave: by a request on storage, which its workers heed once their state is saved.

    `next_take` is the key by which another worker takes the artifact from this one.
    """

    def __init__(self, store: Store, launch: Launch, next_take: str, leaving: Callable[[], bool]):
        self._store, self._launch, self._next_take, self._leaving = store, launch, next_take, leaving
        self._looked, self._stopping = time.monotonic(), False

    def look(self, known: Status) -> bool | None:
        """Look each LOOK_SECONDS whether it is to leave; True if the launch trains, None: it wasn't time to look.

        Raises Stopped where it is and nothing is trained that could be saved, and Untrained where another worker has
        taken what nothing trains here.
        """
        leaving = self._leaving() and not self._stopping
        if time.monotonic() - self._looked < LOOK_SECONDS and not leaving:
            return None
        self._looked = time.monotonic()
        artifact = self._launch.artifact
        begun = known.state == "begun" and known.job is not None and known.job.attempt > self._launch.after
        trained = begun and (known.silent_seconds or 0.0) <= GRACE_SECONDS
        why = "its process is to end" if self._leaving() else asked(self._store, drain_key(self._launch.island))
        if why and trained and not self._stopping:
            ask(self._store, launch_stop_key(self._launch), why)
            self._stopping = True
        elif why and not trained:
            raise Stopped(f"{artifact} is left with nothing to save, {why}")
        elif not trained:
            StopRequests(self._store, artifact, None).require_none()
            if self._store.exists(self._next_take):
                raise Untrained(f"{artifact}: another island has taken it, for nothing trained it here")
        return trained
