"""Many training jobs, as many at once as there is room for, each with a Ray Train of its own, watched on storage."""

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
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.submitted import submitted_job
from ddm_ray.train.ray.driver import Driver
from ddm_ray.train.ray.room import amounts, has_places, has_room, lack, room

# After how long a job that no worker has begun is said to wait for room; a start takes less.
ROOM_SECONDS = 45.0


class TrainingsFailed(TrainingError):
    """Some of several trainings failed, each for its own of the `errors`; the others are finished.

    It passes if all of them do.
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
    starting: Callable[[Artifact], None] | None = None,
    lost: Callable[[], None] = lambda: None,
) -> None:
    """Train several artifacts of a run, as many at once as Ray has room for; returns when all are committed.

    The others are queued in this order, each until those that it is made from are finished. Each has a `placement` of
    its own where they are given by artifact. `starting` is called with each that begins, `watch` with the statuses of
    those that have begun, twice a second at first and each five seconds where nothing changes; `lost` for each attempt
    that loses workers, which is said on stderr. `launch` is that of the only artifact, where one has begun; else each
    begins its own, on the `island` of that name.

    One that gives up doesn't end the others: in the end the only artifact's error is raised, or TrainingsFailed. Raises
    RayError if the Ray cluster hasn't what a placement asks for, unless it `may_grow`: then that is said, and waited
    for.
    """
    unfinished = [artifact for artifact in artifacts if not run.finished(artifact)]
    placements = {each: placement if isinstance(placement, TrainPlacement) else placement[each] for each in unfinished}
    for lacking in dict.fromkeys(lack(each, may_grow) for each in placements.values()):
        if lacking:
            text = f"warning: {lacking}; waiting for nodes. If none will come: Ctrl-C, and change islands.yaml"
            print(text, file=sys.stderr)
    files = list_jobs(run.store, artifacts)
    # The id that Ray's commands take; a private Ray's is of no use to anybody.
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
                    drivers.append(job.start())
                except StorageError as error:
                    if error.passes:
                        raise  # it stays in the queue
                    failures[job.artifact] = error
                except DDMError as error:
                    failures[job.artifact] = error
                else:
                    running.append(job)
                    if starting:
                        starting(job.artifact)
                queue.remove(job)

    observer = Observer(run, listing, least=LOOK_SECONDS)
    drivers: list[Driver] = []
    away = False
    try:
        start_next()
        if crowded := [job.placement for job in queue if is_ready(job)]:
            asked, workers = crowded[0].asked, crowded[0].workers.min
            text = f"{len(running)} of {len(unfinished)} trainings at a time: one asks for {workers} x"
            print(f"{text} ({amounts(asked)}), Ray has {amounts(ray.cluster_resources(), asked)}", file=sys.stderr)
        while queue or running:
            if not running:  # what was waited for has failed
                start_next()
                continue
            # A driver that ends is heard of at once; storage is asked for all else.
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
                away = False
            except StorageError as error:
                # What is away from here may be there for those who train.
                if len(ended) == len(running):
                    raise
                if not away:
                    print(f"warning: {error}; trying again", file=sys.stderr)
                away = True
                time.sleep(LOOK_SECONDS)
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
    """One artifact that is to be trained, or is. `noted`: its launch is, by the caller; else it is once it starts."""

    def __init__(self, run: Run, launch: Launch, placement: TrainPlacement, files: JobFiles, noted: bool):
        self.run, self.artifact, self.placement = run, launch.artifact, placement
        self._launch, self._noted = launch, noted
        self._reader, self._stack = LaunchReader(run.store, launch, files), ExitStack()
        self._began: float | None = None

    def start(self) -> Driver:
        """Begin, in a driver of its own. Raises MissingArtifact, Stopped, StorageError."""
        for needed in self.run.inputs(self.artifact):
            self.run.require(needed)
        if not self._noted:
            StopRequests(self.run.store, self.artifact, None).require_none()
            self._launch = self._stack.enter_context(noted(self.run.store, self._launch))
        self.driver = Driver(ray.get_runtime_context().gcs_address, self.run.url, self._launch, self.placement)
        self._began = time.monotonic()
        return self.driver

    def end(self, error: BaseException | None) -> None:
        """Note how it ended, where it has noted that it began."""
        self._stack.__exit__(type(error) if error else None, error, None)

    def error(self, files: Mapping[Artifact, JobFiles], ended: bool) -> DDMError | None:
        """Why the launch goes no further: as was noted on storage, or as its driver says; None: it does, or is done."""
        if files[self.artifact].committed:
            try:
                self.run.finished(self.artifact)
            except StorageError:
                raise
            except DDMError as error:  # committed as another run's
                return error
            return None
        return self._reader.error(files[self.artifact]) or (self._reason() if ended else None)

    def losses(self, files: Mapping[Artifact, JobFiles]) -> list[str]:
        """Lines on losses of workers that weren't told before: why, and from where the next attempt goes on."""
        job = files[self.artifact]
        step = f"step {job.saved[1]}, the last one saved" if job.saved[1] else "the beginning: no state was saved"
        lines = self._reader.losses(job)
        return [f"{self.artifact}: an attempt was lost: {why}; the next goes on from {step}" for why in lines]

    def has_begun(self, files: Mapping[Artifact, JobFiles]) -> bool:
        """True once an attempt of this launch is there."""
        return bool(self._reader.attempts(files[self.artifact]))

    def warn_if_it_waits(self, files: Mapping[Artifact, JobFiles]) -> None:
        """Say once, after ROOM_SECONDS without a worker or a place for it, what the job asks for and what is free.

        On a small machine workers that have their places take as long to load their libraries.
        """
        if self._began is None or time.monotonic() - self._began < ROOM_SECONDS:
            return
        self._began = None
        if not self.has_begun(files) and not has_places(self.placement):
            print(f"warning: {self.artifact}: no worker has begun yet; {room(self.placement)}", file=sys.stderr)

    def _reason(self) -> DDMError | None:
        """Why its driver ended without having committed. Raises RayError for a Ray that it lost."""
        if self.run.finished(self.artifact):
            return None
        error = self.driver.error()
        if isinstance(error, RayError):
            raise error
        return error or GaveUp(f"{self.artifact} ended uncommitted", self.run.make(self.artifact))


def _as_begun(statuses: Sequence[Status], running: list[_Job], files: Mapping[Artifact, JobFiles]) -> list[Status]:
    """The statuses, but for what an older command's attempts left: that isn't what became of these jobs."""
    before = {job.artifact for job in running if not job.has_begun(files)}
    return [replace(each, state="waiting", job=None) if each.artifact in before else each for each in statuses]
