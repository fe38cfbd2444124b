"""Membership of a job: the attempt that this world's ranks claimed together, and when they have to end it early.

There are three reasons: a newer attempt has superseded this one, storage has a stop request, or the machine will be
preempted.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Any, NoReturn, Self

import torch.distributed as dist

from ddm_ray.errors import DDMError, Preempted, Stopped, StorageError
from ddm_ray.jobs.attempts import Attempt, claimed
from ddm_ray.jobs.fencing import LOOK_SECONDS as LOOK_SECONDS
from ddm_ray.jobs.fencing import Fence, NewerAttempt
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.stops import StopRequests
from ddm_ray.jobs.versions import installed_versions
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.store.retries import SHORT_RETRIES
from ddm_ray.store.store import Store
from ddm_ray.train.claiming import begin_attempt
from ddm_ray.train.failures import failure_note, hang_note
from ddm_ray.train.job import TrainJob
from ddm_ray.train.ranks import decide_on_first
from ddm_ray.train.step_sync import Agreed, Flags

LOCAL_LOOK_SECONDS = 2.0
"""Longest pause between looks at a disk, where they cost nothing."""
COMMIT_SECONDS = 20.0
"""Longest wait for a newer attempt, which has dropped this one's last state, to commit the job."""


class Membership:
    """The attempt of this world; every rank makes one. A context manager: notes the error that ends the attempt.

    `notice` says whether this rank has to leave. Raises what `begin_attempt` does.
    """

    def __init__(
        self,
        run: Run,
        job: TrainJob,
        placement: TrainPlacement,
        launch: Launch | None = None,
        notice: Callable[[], bool] = lambda: False,
    ):
        self.run, self.job, self._launch, self._notice = run, job, launch, notice
        self._elastic = placement.workers.elastic
        self.lineage = (run, *run.predecessors(job.artifact))
        begun = decide_on_first(lambda: begin_attempt(self.lineage, job, placement, launch))
        number, self.micro_batch, self.threads = begun
        self.identity = run.identity(job.artifact)
        self.attempt = Attempt(run.store, job.artifact, number)
        # Heartbeats, notes and deletions aren't worth minutes of waiting for storage.
        self.prompt_attempt = Attempt(Store(run.url, SHORT_RETRIES), job.artifact, number)
        self._watcher = StorageWatcher(self.attempt, launch) if dist.get_rank() == 0 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._watcher:
            self._watcher.close()
        if error is not None:
            self._note(failure_note(error, self.micro_batch, self._elastic))

    def facts(self) -> dict[str, Any]:
        """Fields that are in every heartbeat of the attempt."""
        place = self._launch.place if self._launch else {}
        world = {"world_size": dist.get_world_size(), "micro_batch": self.micro_batch, "versions": installed_versions()}
        return {"host": socket.gethostname(), "pid": os.getpid(), **world, **place}

    def flags(self) -> Flags:
        """This rank's facts for the step's exchange."""
        noticed, watcher = self._notice(), self._watcher
        stopped, superseded = (bool(watcher.stop), bool(watcher.newer)) if watcher else (False, False)
        return Flags(leaving=noticed or stopped, superseded=superseded)

    def after(self, done: int, agreed: Agreed) -> None:
        """End if a newer attempt has taken this one's place: raise Superseded, or Overtaken if that one has ended."""
        if agreed.any_rank.superseded:
            decide_on_first(lambda: self._raise_superseded(done))

    def leave(self, done: int) -> None:
        """End after `done` steps, which are saved: raise Stopped or Preempted, on all ranks together."""
        decide_on_first(lambda: self._raise_left(done))

    def note_hang(self, text: str) -> None:
        """Note that this rank hangs."""
        self._note(hang_note(f"rank {dist.get_rank()} on {socket.gethostname()}: {text}", self.micro_batch))

    def finished_by_newer(self) -> bool:
        """True once a newer attempt has committed the job; it drops this one's states just before."""
        store, artifact = self.run.store, self.job.artifact
        until = time.monotonic() + COMMIT_SECONDS
        while not self.run.finished(artifact):
            if max(claimed(store, artifact), default=0) <= self.attempt.number or time.monotonic() > until:
                return False
            time.sleep(0.5)
        return True

    def _raise_superseded(self, done: int) -> NoReturn:
        assert self._watcher and self._watcher.newer
        raise self._watcher.newer.error(self.attempt.number, self._launch.id if self._launch else None, done)

    def _raise_left(self, done: int) -> NoReturn:
        saved = f"step {done} is saved"
        if self._watcher and (stop := self._watcher.stop):
            raise type(stop)(f"{stop.message}; {saved}", stop.fix)
        raise Preempted(f"{self.job.artifact}: asked to leave; {saved}")

    def _note(self, note: dict[str, Any]) -> None:
        """Write why the attempt ends, if no rank has written it before."""
        try:
            self.prompt_attempt.fail(note)
        except StorageError as refused:
            print(f"warning: {refused}", file=sys.stderr)


class StorageWatcher:
    """A thread that looks at storage every LOOK_SECONDS, at a disk more often, while this process trains.

    It ends once it knows a `newer` attempt that lives or has ended, or a request to `stop`. What can't be read now is
    read at the next look.
    """

    def __init__(self, attempt: Attempt, launch: Launch | None = None):
        self.newer: NewerAttempt | None = None
        self.stop: Stopped | None = None
        self._fence, self._closing = Fence(attempt), Event()
        self._pause = min(LOOK_SECONDS, LOCAL_LOOK_SECONDS) if attempt.store.local else LOOK_SECONDS
        self._requests = StopRequests(attempt.store, Artifact(attempt.job), launch)
        self._thread = Thread(target=self._watch, name="watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, without waiting for a look that storage holds up."""
        self._closing.set()

    def _watch(self) -> None:
        while not (self.newer or self.stop or self._closing.wait(self._pause)):
            try:
                newer, stop = self._fence.look(), self._requests.look()
            except (DDMError, OSError, ValueError, RecursionError):
                continue
            if newer and newer.lives is not None:
                self.newer = newer
            self.stop = stop
