"""The loop of an island's worker: look at storage, take a job, train it, look again, until all is finished.

A take is a file with the next number, which storage creates for one worker only. The worker that takes a job asks
earlier launches to end, and begins once a living attempt has saved its state.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ddm_ray.errors import DDMError, RayError, Stopped, StorageError, Superseded
from ddm_ray.islands.choose import OpenJob, choose
from ddm_ray.islands.run_view import RunObserver, RunView, take_key
from ddm_ray.islands.takeover import TakeOver
from ddm_ray.islands.worker_heartbeat import LEASE_SECONDS, WorkerHeartbeat
from ddm_ray.jobs.fencing import LOOK_SECONDS
from ddm_ray.jobs.launches import Launch, noted
from ddm_ray.jobs.status import Status
from ddm_ray.jobs.stops import StopRequests, ask, asked, drain_key, launch_stop_key
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store

IDLE_SECONDS, PAID_IDLE_SECONDS = 2.0, 10.0
"""Pause between the looks of a waiting worker, on a disk and in a bucket, where each look costs money."""
AGAIN_SECONDS, MAX_AGAIN_SECONDS = 30.0, 600.0
"""Shortest and longest time after which a worker retries a job that has failed here."""

Train = Callable[[Run, Launch, Callable[[list[Status]], None]], None]
"""Trains a launch's artifact to its commit, and calls back with its statuses. Raises DDMError if it gives up."""
Report = Callable[[list[Status], str], None]


@dataclass
class _Failures:
    """This worker's errors by artifact, and the time, by its clock, until which it doesn't retry; infinite: never."""

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
        """Artifacts that must not be tried now."""
        return frozenset(artifact for artifact, until in self.until.items() if now < until)

    def final(self, artifacts: list[Artifact]) -> DDMError | None:
        """The first error if there are artifacts and all have failed here for good; None otherwise."""
        if not artifacts or any(self.until.get(artifact) != math.inf for artifact in artifacts):
            return None
        return self.errors[artifacts[0]]


class IslandWorker:
    """Works for one island on one run; `run_to_end` does it.

    `train` trains an artifact. `report` gets all statuses at each look, and words on what the worker does.
    `require_room` raises RayError if nothing can be trained here now; it is called before each take. `leaving` returns
    True once this process must end; its state is saved first. `job`: id of this process's Ray job, or "".
    """

    def __init__(
        self,
        run: Run,
        heartbeat: WorkerHeartbeat,
        observer: RunObserver,
        train: Train,
        report: Report,
        require_room: Callable[[], None] = lambda: None,
        leaving: Callable[[], bool] = lambda: False,
        job: str = "",
    ):
        self._run, self._heartbeat, self._observer, self._train = run, heartbeat, observer, train
        self._report, self._require_room = report, require_room
        self._leaving, self._job, self._failures = leaving, job, _Failures()
        self._island = heartbeat.state.island
        self._idle = IDLE_SECONDS if run.store.local else PAID_IDLE_SECONDS

    def run_to_end(self) -> str:
        """Work until the run is finished, the island is drained, or the process must leave; return words on which.

        Raises RayError if the Ray cluster is gone or lacks resources of the placement. Raises the first error if all
        jobs that are left have failed here for good and no other worker trains one.
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

    def _look(self) -> RunView | None:
        """The current view of the run, once storage answers; None if the process must leave before that."""
        warned = False
        while True:
            try:
                return self._observer.look(self._heartbeat.state)
            except (StorageError, OSError) as error:
                if isinstance(error, StorageError) and not error.passes:
                    raise
                if not warned:
                    print(f"warning: storage can't be asked, trying on: {error}", file=sys.stderr)
                warned = True
            if self._leaving():
                return None
            time.sleep(self._idle)

    def _act(self, view: RunView) -> None:
        """Train a job, or wait until the next look."""
        if view.ahead:
            where = " ".join(filter(None, (view.ahead.host, view.ahead.job)))
            self._wait(view, f"worker {view.ahead.id} of this island is at work on {where}")
            return
        jobs, barred = list(view.jobs), self._failures.now(time.monotonic())
        while True:
            choice = choose(jobs, view.workers, self._heartbeat.id, barred)
            if choice.take is None:
                break
            self._require_room()
            if self._take(view, choice.take):
                return
            jobs.remove(choice.take)  # another worker was first
        possible = [job for job in view.jobs if not job.obstacle]
        error = self._failures.final([job.artifact for job in possible])
        if error and not any(job.holder for job in possible):
            raise error  # nothing is left that this island could train
        self._wait(view, choice.reason + (f"; failed here: {error}" if error else ""))

    def _wait(self, view: RunView, reason: str) -> None:
        with suppress(StorageError):
            self._heartbeat.update(holds="", waits=reason)
        self._report(view.statuses, f"waits: {reason}")
        time.sleep(self._idle)

    def _take(self, view: RunView, job: OpenJob) -> bool:
        """Train the job; return False if another worker has taken it first."""
        store, artifact = self._run.store, job.artifact
        begun = Launch(artifact, island=self._island, job=self._job)
        stopper = _Stopper(store, begun, self._leaving)
        try:
            # Written before the take, since other workers list takes first and read heartbeats afterwards.
            self._heartbeat.update(holds=artifact, waits="")
            before = self._observer.newest_take(artifact)
            take = json.dumps({"worker": self._heartbeat.id, "launch": begun.id}).encode()
            if not store.create(take_key(artifact, self._observer.takes(artifact) + 1), take):
                return False
            self._report(view.statuses, f"takes {artifact}" + (f" over from {job.holder}" if job.holder else ""))
            # A job without a holder has an expired lease.
            take_over = TakeOver(self._run, artifact, f"worker {self._heartbeat.id}", bool(job.holder), before)
            while not take_over.done:
                stopper.require_none()
                time.sleep(self._idle)
            with noted(store, begun) as launch:
                stopper.launch = launch
                self._train(self._run, launch, partial(self._watch, stopper))
            self._report(view.statuses, f"{artifact} is finished")
        except RayError:
            raise
        except (Stopped, Superseded) as error:
            if error.passes and not stopper.trained:
                # Taken over before it began. Otherwise two islands without room would take the job in turns.
                self._failures.add(artifact, error, time.monotonic())
            self._report(view.statuses, f"leaves {artifact}: {error}")
            time.sleep(self._idle)
        except DDMError as error:
            self._failures.add(artifact, error, time.monotonic())
            self._report(view.statuses, f"gives up {artifact}: {error}")
        finally:
            self._observer.list_next()
            with suppress(StorageError):
                self._heartbeat.update(holds="")
        return True

    def _watch(self, stopper: "_Stopper", statuses: list[Status]) -> None:
        (known,) = statuses
        job = known.job if known.state == "begun" else None
        # A router is small and trains at far fewer FLOP/s than an expert, so its speed doesn't count.
        if job and known.artifact.kind != "router" and (flops := job.value("flops_per_second")):
            self._heartbeat.update(speed=float(f"{flops:.1g}"))  # rounded, since each change is a request
        self._report(statuses, f"trains {known.artifact}")
        stopper.look(known)


class _Stopper:
    """Ends a launch by a request on storage. Its workers save their state and end.

    `trained`: an attempt of the launch has been seen training.
    """

    def __init__(self, store: Store, launch: Launch, leaving: Callable[[], bool]):
        self.launch, self.trained = launch, False
        self._store, self._leaving = store, leaving
        self._looked, self._stopping = time.monotonic(), False

    def look(self, known: Status) -> None:
        """Check every LOOK_SECONDS whether the launch must end. Raises Stopped if there is nothing to save."""
        leaving = self._leaving() and not self._stopping
        if time.monotonic() - self._looked < LOOK_SECONDS and not leaving:
            return
        self._looked = time.monotonic()
        begun = known.state == "begun" and known.job is not None and known.job.attempt > self.launch.after
        if begun and known.job and (known.silent_seconds or 0.0) <= known.job.lease_seconds(LEASE_SECONDS):
            self.trained = True
            if not self._stopping and (why := self._why()):
                ask(self._store, launch_stop_key(self.launch), why)
                self._stopping = True
        else:
            self.require_none()

    def require_none(self) -> None:
        """Raise Stopped if this worker, the job or the launch must end."""
        if why := self._why():
            raise Stopped(f"{self.launch.artifact} is left with nothing to save, {why}")
        StopRequests(self._store, self.launch.artifact, self.launch).require_none()

    def _why(self) -> str | None:
        return "its process is to end" if self._leaving() else asked(self._store, drain_key(self.launch.island))
