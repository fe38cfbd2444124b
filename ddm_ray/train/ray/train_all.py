"""Many training jobs: as many at once as Ray has room for, each in a driver process, watched on storage."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import connection

import ray

from ddm_ray.errors import DDMError, GaveUp, RayError, StorageError, TrainingError
from ddm_ray.jobs.job_files import JobFiles, list_jobs
from ddm_ray.jobs.launches import Launch, LaunchReader, noted
from ddm_ray.jobs.observer import LOOK_SECONDS, Observer
from ddm_ray.jobs.status import Status, status
from ddm_ray.jobs.stops import StopRequests
from ddm_ray.placement import TrainPlacement
from ddm_ray.remedies import Make
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.submitted import submitted_job
from ddm_ray.train.ray.driver import Driver
from ddm_ray.train.ray.room import amounts, has_places, has_room, is_free, lack, room

# Seconds after which a job without a worker is reported as waiting for room; a start takes less.
WARN_SECONDS = 45.0
# The same if the resources that it asks for are free, so that it seems to be starting.
START_SECONDS = 300.0
# Longest pause after a look that storage didn't answer.
MAX_AWAY_SECONDS = 10.0


class TrainingsFailed(TrainingError):
    """Some of several trainings failed, each with its error in `errors`; the others are finished.

    It passes if all of these errors do.
    """

    def __init__(self, errors: Mapping[Artifact, DDMError], number: int):
        super().__init__(f"{len(errors)} of {number} trainings failed: {', '.join(errors)}")
        self.errors = errors
        self.passes = all(error.passes for error in errors.values())


def train_all(
    run: Run,
    artifacts: Sequence[Artifact],
    placement: TrainPlacement | Mapping[Artifact, TrainPlacement],
    watch: Callable[[list[Status]], None] | None = None,
    may_grow: bool = False,
    launch: Launch | None = None,
    island: str = "",
    starting: Callable[[Artifact], None] = lambda artifact: None,
    lost: Callable[[], None] = lambda: None,
    leaving: Callable[[], bool] = lambda: False,
) -> None:
    """Train several artifacts of a run, as many at once as Ray has room for; returns when all are committed.

    The others are queued in this order, each until the artifacts that it is made from are finished. `placement` is one
    for all, or one for each artifact. `starting` is called with each artifact before it begins, and may raise the
    DDMError that it fails with; `watch` with the statuses of those that have begun, twice a second at first and each
    five seconds if nothing changes; `lost` for each attempt that loses workers, which is also printed on stderr.
    `leaving` returns True once the command is to end: `watch` sees to that while storage answers; without storage the
    trainings end. `launch` is the launch of a single artifact, if it has begun already; otherwise each artifact gets
    one, on the `island` of that name.

    An artifact that gives up doesn't end the others: at the end the single artifact's error is raised, or
    TrainingsFailed. Raises RayError if the Ray cluster lacks resources of a placement; if it `may_grow`, a warning is
    printed, and nodes are waited for.
    """
    unfinished = [artifact for artifact in artifacts if not run.finished(artifact)]
    placements = {each: placement if isinstance(placement, TrainPlacement) else placement[each] for each in unfinished}
    for lacking in dict.fromkeys(lack(each, may_grow) for each in placements.values()):
        if lacking:
            text = f"warning: {lacking}; waiting for nodes. If none will come: Ctrl-C, and change islands.yaml"
            print(text, file=sys.stderr)
    files = list_jobs(run.store, artifacts)
    # The id for Ray's commands; that of a job on a private Ray is of no use.
    cluster_job = submitted_job() or (ray.get_runtime_context().get_job_id() if may_grow else "")
    launches = {each: launch or Launch(each, island=island) for each in unfinished}
    launches = {each: replace(begun, job=begun.job or cluster_job) for each, begun in launches.items()}
    queue = [_Job(run, launches[each], placements[each], files[each], launch is not None) for each in unfinished]
    running: list[_Job] = []
    failures: dict[Artifact, DDMError] = {}

    def listing(known: Sequence[Status]) -> list[Status]:
        nonlocal files
        files = list_jobs(run.store, artifacts)
        finished = {each.artifact: each for each in known if each.state == "finished"}
        return [finished.get(artifact) or status(run, artifact, files[artifact]) for artifact in artifacts]

    def is_ready(job: _Job) -> bool:
        return not {each.artifact for each in (*queue, *running)}.intersection(run.inputs(job.artifact))

    def start_next() -> None:
        for job in list(queue):
            beside = [each.placement for each in running]
            if is_ready(job) and has_room(job.placement, beside, ray.cluster_resources()):
                try:
                    starting(job.artifact)
                    drivers.append(job.start())
                except StorageError as error:
                    if error.passes:
                        raise  # it stays in the queue
                    failures[job.artifact] = error
                except DDMError as error:
                    failures[job.artifact] = error
                else:
                    running.append(job)
                queue.remove(job)

    observer = Observer(run, listing, least=LOOK_SECONDS)
    drivers: list[Driver] = []
    away = 0.0
    try:
        start_next()
        if crowded := [job.placement for job in queue if is_ready(job)]:
            asked, workers = crowded[0].asked, crowded[0].workers.min
            text = f"{len(running)} of {len(unfinished)} trainings at a time: one asks for {workers} x"
            print(f"{text} ({amounts(asked)}), Ray has {amounts(ray.cluster_resources(), asked)}", file=sys.stderr)
        while queue or running:
            if not running:  # the artifacts that the others waited for have failed
                start_next()
                continue
            # The end of a driver wakes this loop at once; all other news is on storage.
            connection.wait([job.driver.sentinel for job in running], observer.pause(time.monotonic()))
            ended = [job for job in running if job.driver.ended()]
            try:
                if ended:
                    observer.list_next()
                statuses = observer.look(time.monotonic())
                for job in list(running):
                    for why in job.losses(files):
                        print(why, file=sys.stderr)
                        lost()
                    error = job.error(files, job in ended)
                    if error:
                        failures[job.artifact] = error
                    if error or files[job.artifact].committed:
                        running.remove(job)
                        job.end(error)
                start_next()
                if watch:
                    queued = {job.artifact for job in queue}
                    watch([each for each in _as_begun(statuses, running, files) if each.artifact not in queued])
                away = 0.0
            except StorageError as error:
                # Storage that is away from here may be there for the workers.
                if len(ended) == len(running) or (leaving() and away == MAX_AWAY_SECONDS):
                    raise
                if not away:
                    print(f"warning: {error}; trying again", file=sys.stderr)
                away = min(max(2 * away, LOOK_SECONDS), MAX_AWAY_SECONDS)
                time.sleep(away)
            else:
                for job in running:
                    job.warn_if_it_waits(files)
    except BaseException as error:
        for job in running:
            job.end(error)
        raise
    finally:
        for driver in drivers:
            driver.ask_to_stop()
        for driver in drivers:
            driver.stop()
    if failures:
        raise TrainingsFailed(failures, len(artifacts)) if len(artifacts) > 1 else failures[artifacts[0]]


class _Job:
    """One artifact in the queue or in training. `noted`: the caller has noted its launch; otherwise `start` does."""

    def __init__(self, run: Run, launch: Launch, placement: TrainPlacement, files: JobFiles, noted: bool):
        self.run, self.artifact, self.placement = run, launch.artifact, placement
        self._launch, self._noted = launch, noted
        self._reader, self._stack = LaunchReader(run.store, launch, files), ExitStack()
        self._began: float | None = None

    def start(self) -> Driver:
        """Start its driver. Raises MissingArtifact, Stopped, StorageError."""
        for needed in self.run.inputs(self.artifact):
            self.run.require(needed)
        if not self._noted:
            StopRequests(self.run.store, self.artifact, None).require_none()
            self._launch = self._stack.enter_context(noted(self.run.store, self._launch))
        self.driver = Driver(ray.get_runtime_context().gcs_address, self.run.url, self._launch, self.placement)
        self._began = time.monotonic()
        return self.driver

    def end(self, error: BaseException | None) -> None:
        """Note how it ended, if `start` noted that it began."""
        self._stack.__exit__(type(error) if error else None, error, None)

    def error(self, files: Mapping[Artifact, JobFiles], ended: bool) -> DDMError | None:
        """The error that ended the launch, by a note on storage or by its driver; None if it goes on or is finished."""
        if files[self.artifact].committed:
            try:
                self.run.finished(self.artifact)
            except StorageError:
                raise
            except DDMError as error:  # another run has committed it
                return error
            return None
        return self._reader.error(files[self.artifact]) or (self._reason() if ended else None)

    def losses(self, files: Mapping[Artifact, JobFiles]) -> list[str]:
        """Lines on new losses of workers: the reason, and the state that the next attempt goes on from."""
        job = files[self.artifact]
        step = f"step {job.saved[1]}, the last one saved" if job.saved[1] else "the beginning: no state was saved"
        lines = self._reader.losses(job)
        return [f"{self.artifact}: an attempt was lost: {why}; the next goes on from {step}" for why in lines]

    def has_begun(self, files: Mapping[Artifact, JobFiles]) -> bool:
        """True once this launch has an attempt."""
        return bool(self._reader.attempts(files[self.artifact]))

    def warn_if_it_waits(self, files: Mapping[Artifact, JobFiles]) -> None:
        """Warn once, after WARN_SECONDS without a worker or a place for it, with the resources asked for and free.

        A worker that has its place isn't warned of, nor for START_SECONDS one that finds its resources free: on a small
        machine imports may take as long.
        """
        if self._began is None or (waited := time.monotonic() - self._began) < WARN_SECONDS:
            return
        if waited < START_SECONDS and not self.has_begun(files) and is_free(self.placement):
            return
        self._began = None
        if not self.has_begun(files) and not has_places(self.placement):
            print(f"warning: {self.artifact}: no worker has begun yet; {room(self.placement)}", file=sys.stderr)

    def _reason(self) -> DDMError | None:
        """The error of a driver that ended before the artifact was committed. Raises RayError if it lost its Ray."""
        if self.run.finished(self.artifact):
            return None
        error = self.driver.error()
        if isinstance(error, RayError):
            raise error
        return error or GaveUp(f"{self.artifact} ended uncommitted", Make(self.run.url, self.artifact))


def _as_begun(statuses: Sequence[Status], running: list[_Job], files: Mapping[Artifact, JobFiles]) -> list[Status]:
    """The statuses, with jobs that have no attempt of their own launch as waiting: older attempts don't count."""
    before = {job.artifact for job in running if not job.has_begun(files)}
    return [replace(each, state="waiting", job=None) if each.artifact in before else each for each in statuses]
