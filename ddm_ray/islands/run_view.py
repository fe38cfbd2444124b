"""The run view: what an island's worker sees on storage. It has the training jobs, their holders, and all workers.

A holder has a lease and announces its length. The lease is renewed when this observer sees a change in what the holder
or its attempt writes, by this observer's own clock. A job with an expired lease is free.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.islands.choose import OpenJob, Worker
from ddm_ray.islands.worker_heartbeat import LEASE_SECONDS, WorkerState, forget, read_workers
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.jobs.job_files import TAKES, JobFiles, list_jobs
from ddm_ray.jobs.job_status import START_SECONDS
from ddm_ray.jobs.judge import Sightings
from ddm_ray.jobs.notes import Take, read_note
from ddm_ray.jobs.observer import Observer
from ddm_ray.jobs.status import Status, status
from ddm_ray.jobs.stops import asked, drain_key, stop_key
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.spelling import duration
from ddm_ray.train.job import train_job

LIST_SECONDS, LACK_SECONDS = 10.0, 30.0
"""Pause between two listings while a job is silent, and between two looks for missing inputs."""


@dataclass(frozen=True)
class RunView:
    """The facts for a worker's choice: unfinished jobs, living workers, and the statuses of all jobs.

    `drained`: words on the request that drains the island, or None. `ahead`: an older living worker of the same island,
    which goes first, or None.
    """

    statuses: list[Status]
    jobs: list[OpenJob]
    workers: list[Worker]
    drained: str | None
    ahead: WorkerState | None

    @property
    def finished(self) -> bool:
        """True if nothing is left to train."""
        return not self.jobs


class RunObserver:
    """Gives one worker's views of `artifacts` of a run.

    `work_of` returns the FLOP of an artifact's whole training.
    """

    def __init__(
        self,
        run: Run,
        artifacts: Sequence[Artifact],
        work_of: Callable[[Artifact], float],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run, self._artifacts = run, artifacts
        self._work_of, self._clock = work_of, clock
        self._files: dict[Artifact, JobFiles] = {}
        self._observer = Observer(run, self._list, least=LIST_SECONDS)
        self._seen, self._now = Sightings(), 0.0
        self._read_takes: dict[tuple[Artifact, int], dict[str, Any]] = {}
        self._ready, self._lacks = set[Artifact](), dict[Artifact, tuple[str, float]]()

    def look(self, me: WorkerState) -> RunView:
        """The current view of the run for the worker `me`. Raises StorageError."""
        now = self._now = self._clock()
        # Takes are listed before heartbeats are read, since a worker writes a take into its heartbeat first.
        statuses = self._observer.look(now)
        known = [each for each in read_workers(self._run.store) if each.id != me.id]
        others = [each for each in known if self._lives(each, now)]
        ahead = [each for each in others if each.island == me.island and each.number < me.number]
        for dead in known:
            if dead.island == me.island and dead.number < me.number and dead not in others:
                forget(self._run.store, dead)
        living = [me, *others]
        by_island = {each.island: each for each in sorted(living, key=_number, reverse=True)}
        by_id = {each.id: each for each in (*known, me)}
        return RunView(
            statuses,
            [self._job(each, living, by_id) for each in statuses if each.state != "finished"],
            [Worker(each.id, each.speed) for each in by_island.values()],
            asked(self._run.store, drain_key(me.island)),
            ahead[0] if ahead else None,
        )

    def list_next(self) -> None:
        """Make the next look list files."""
        self._observer.list_next()

    def takes(self, artifact: Artifact) -> int:
        """Number of the artifact's newest known take; 0 if there is none."""
        return self._files[artifact].takes

    def _list(self, known: Sequence[Status]) -> list[Status]:
        self._files = list_jobs(self._run.store, self._artifacts)
        finished = {each.artifact: each for each in known if each.state == "finished"}
        return [finished.get(each) or status(self._run, each, self._files[each]) for each in self._artifacts]

    def _lives(self, worker: WorkerState, now: float) -> bool:
        return not worker.ended and self._seen.see(worker.id, worker.beat, now) <= worker.lease_seconds

    def _job(self, known: Status, living: Sequence[WorkerState], by_id: Mapping[str, WorkerState]) -> OpenJob:
        artifact = known.artifact
        work = max(1.0, self._work_of(artifact) * (1.0 - known.fraction))
        if self._files[artifact].stopped:
            return OpenJob(artifact, work, obstacle=f"is stopped, {asked(self._run.store, stop_key(artifact))}")
        if known.state == "damaged":
            return OpenJob(artifact, work, obstacle=f"is damaged: {known.error}")
        if holder := self._holder(known, living, by_id):
            return OpenJob(artifact, work, holder, known.seconds_left)
        return OpenJob(artifact, work, obstacle=self._lack(artifact))

    def _holder(self, known: Status, living: Sequence[WorkerState], by_id: Mapping[str, WorkerState]) -> str:
        """Id of the job's worker, or words on an attempt that no living worker holds; "" if the job is free."""
        artifact, job, silence = known.artifact, known.job, known.silent_seconds or 0.0
        take = self.newest_take(artifact)
        worker = by_id.get(take.get("worker", ""))
        if worker is not None and worker in living and worker.holds == artifact:
            # The lease begins with the take. Earlier silence is that of the previous holder.
            sign = self._files[artifact].takes, job and (job.attempt, job.sign)
            silence = self._seen.see(f"held {artifact}", sign, self._now)
            return "" if silence > max(START_SECONDS, job.lease_seconds(0.0) if job else 0.0) else worker.id
        if job is None or known.state == "stopped":
            return ""
        if known.state == "failed" and job.failure and job.failure["final"]:
            return ""  # after other failures the launch goes on, if it still lives
        lease = LEASE_SECONDS
        if take and take.get("launch", "") == self._newest_launch(artifact):
            if worker is None or worker.ended or worker.holds != artifact or not self._files[artifact].attempts:
                return ""
            lease = worker.lease_seconds
        if silence > job.lease_seconds(lease):
            return ""
        words = f"attempt {job.attempt}{job.place}" if job.attempt else "a launch that begins"
        return words + (f", silent for {duration(silence)}" if known.silent else "")

    def newest_take(self, artifact: Artifact) -> dict[str, Any]:
        """The newest take of the job: ids of its worker and launch; empty if there is none, or if it can't be read."""
        number = self._files[artifact].takes
        if number and (artifact, number) not in self._read_takes:
            with suppress(CorruptArtifact):
                take = read_note(self._run.store, take_key(artifact, number), Take) or {}
                self._read_takes[artifact, number] = take
        return self._read_takes.get((artifact, number), {})

    def _newest_launch(self, artifact: Artifact) -> str | None:
        """Id of the newest attempt's launch; before the first attempt, of the launch that began last."""
        files = self._files[artifact]
        if not files.attempts:
            return files.last_launch[0] if files.last_launch else None
        return Attempt(self._run.store, artifact, files.attempts[-1]).claim().get("launch")

    def _lack(self, artifact: Artifact) -> str:
        """Words on the missing input of an artifact; "" if it can be trained."""
        if artifact in self._ready:
            return ""
        lack, until = self._lacks.get(artifact, ("", -math.inf))
        if self._now < until:
            return lack
        lack = ""
        for needed in self._run.inputs(artifact):
            try:
                if not lack and not self._run.finished(needed, accepted=True):
                    wait = "accepted" if self._run.by_hand(needed) else "finished"
                    lack = f"needs {needed}, which isn't {wait}"
            except (DriftError, CorruptArtifact) as error:
                lack = f"needs {needed}, which is damaged: {error}"
        if lack:
            self._lacks[artifact] = lack, self._now + LACK_SECONDS
        else:
            self._ready.add(artifact)
        return lack


def take_key(artifact: Artifact, number: int) -> str:
    """Key of an artifact's take of that number. The take names its worker and its launch."""
    return f"{artifact}/{TAKES}/{number:04d}"


def _number(worker: WorkerState) -> int:
    """Number among the workers of an island. The oldest living one trains, and the others stand by."""
    return worker.number


def work_of(run: Run) -> Callable[[Artifact], float]:
    """A function from an artifact to the FLOP of its whole training."""
    by_artifact: dict[Artifact, float] = {}

    def flops(artifact: Artifact) -> float:
        if artifact not in by_artifact:
            job = train_job(run, artifact)
            by_artifact[artifact] = float(job.training_flops(job.train.steps))
        return by_artifact[artifact]

    return flops
