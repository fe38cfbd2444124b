"""The state of each artifact of a run, read from storage without relying on any machine's clock."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from ddm_ray.errors import CorruptArtifact, DDMError, DriftError, Stopped, StorageError
from ddm_ray.jobs.damage import REQUESTS, Damage, damages
from ddm_ray.jobs.job_files import JobFiles, list_jobs
from ddm_ray.jobs.job_status import JobStatus, job_status
from ddm_ray.jobs.judge import Lease
from ddm_ray.remedies import Allow
from ddm_ray.run.chunk_records import ChunksProgress, chunks_progress
from ddm_ray.run.graph import KINDS, Artifact
from ddm_ray.run.info import Info
from ddm_ray.run.inventory import inventory
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import RUN_FILE, Run

SILENT_SECONDS, BETWEEN_SECONDS = 10.0, 30.0
"""Silence after which a job may be dead, while it trains and between attempts.

A job beats once a second, later every five seconds, or once per step if steps take longer. Storage may delay a beat.
"""
State = Literal["finished", "begun", "failed", "stopped", "waiting", "damaged"]


@dataclass(frozen=True)
class Status:
    """One artifact of the run at the URL `run`, and its state.

    `info`: the record of a finished artifact. `chunks`: progress of rows or images that have begun. `job`: status of a
    training job that is launched, begun or failed. A job is failed if its newest attempt failed; usually the next one
    is about to begin. A job is stopped if it ended or waits because of a stop request. A damaged artifact can't be read
    or was made otherwise; `error` has the reason and the remedy. A finished artifact that is accepted by hand is
    `unaccepted` until then. `silent_seconds`: how long an observer has seen no sign of the job, None before `observe`.
    `older`: numbers of older attempts that may still train beside the newest, while the observer doesn't know yet.
    `picture`: step and key, below the artifact, of the newest picture of what a model samples, if its files are listed.
    """

    artifact: Artifact
    state: State
    info: Info | None = None
    chunks: ChunksProgress | None = None
    job: JobStatus | None = None
    silent_seconds: float | None = None
    unjudged: bool = False
    older: tuple[int, ...] = ()
    unaccepted: bool = False
    error: DDMError | None = None
    run: str = ""
    picture: tuple[int, str] | None = None

    @property
    def fraction(self) -> float:
        """The finished share, 0 to 1. It is 1 only for committed artifacts."""
        if self.state == "finished":
            return 1.0
        if self.chunks:
            return min(0.99, self.chunks.units_done / max(1, self.chunks.units))
        return min(0.99, self.job.step / self.job.steps) if self.job and self.job.steps else 0.0

    @property
    def lease(self) -> Lease | None:
        """The lease of the attempt or launch that `job` describes; None if there is no job."""
        if (job := self.job) is None:
            return None
        seconds = job.lease_seconds(BETWEEN_SECONDS if job.between else SILENT_SECONDS)
        return Lease(job.attempt, job.sign, seconds, ended=self.state not in ("begun", "waiting") or job.left)

    @property
    def silent(self) -> bool:
        """True if the job is launched or begun and its lease has expired. It may be dead."""
        if self.state not in ("begun", "waiting") or self.lease is None or self.silent_seconds is None:
            return False
        return self.silent_seconds > self.lease.seconds

    @property
    def picture_lines(self) -> tuple[str, str]:
        """Two lines: of what the newest picture is, and where it lies. There has to be one."""
        assert self.picture
        step, key = self.picture
        return f"newest picture, of {self.artifact} after {step} steps:", f"{self.run}/{self.artifact}/{key}"

    @property
    def may_be_dead(self) -> bool:
        """True if the job is silent, or gave no sign of life for as long as `survey_once` looks."""
        return self.silent or self.unjudged

    @property
    def word(self) -> str:
        """The state as a word for tables. A launch without an attempt has words of its own."""
        if self.state != "waiting" or self.job is None:
            return self.state
        return {True: "starting", False: "ended", None: "launched"}[self.job.lives]

    @property
    def seconds_left(self) -> float | None:
        """Time left at the last known speed; None if that isn't known."""
        rate = self.job.value("steps_per_second") if self.job and self.state == "begun" else None
        if not self.job or not rate or self.job.steps is None or self.may_be_dead:
            return None
        return (self.job.steps - self.job.step) / rate


def status(run: Run, artifact: Artifact, files: JobFiles | None = None) -> Status:
    """The status of one artifact. `files`: those of a training job, if they are listed already.

    An error that concerns this artifact only makes it damaged. Raises StorageError if the whole storage fails.
    """
    return _or_damaged(run, artifact, lambda: _status(run, artifact, files))


def _or_damaged(run: Run, artifact: Artifact, look: Callable[[], Status]) -> Status:
    """The status that `look` finds, or a damaged one for its error if other objects can be read."""
    for last in (False, True):
        try:
            return look()
        except (StorageError, CorruptArtifact, DriftError) as error:
            run.store.exists(RUN_FILE)  # raises if nothing can be read
            # An outage may have ended meanwhile.
            if last or not isinstance(error, StorageError):
                return Status(artifact, "damaged", error=error, run=run.url)
    raise AssertionError


def _status(run: Run, artifact: Artifact, files: JobFiles | None) -> Status:
    picture = files.picture if files else None

    def in_state(state: State, **facts: Any) -> Status:
        return Status(artifact, state, run=run.holder(artifact).url, picture=picture, **facts)

    # An input that is damaged has a line of its own.
    known = files is None or files.committed or files.unlisted
    if manifest := run.finished(artifact, unread=(CorruptArtifact,)) if known else None:
        accepted = run.manifest(artifact, accepted=True) if run.by_hand(artifact) else manifest
        unaccepted = accepted is None or accepted.digest != manifest.digest
        return in_state("finished", info=artifact.info.of(manifest), unaccepted=unaccepted)
    chunks = chunks_progress(run.store, artifact) if artifact.units else None
    job = job_status(run.store, artifact, files) if artifact.trains else None
    if job:
        begun: State = "stopped" if job.stopped else "begun" if job.attempt else "waiting"
        return in_state("failed" if job.failure and not (job.left or job.stopped) else begun, job=job)
    if files and files.stopped:
        return in_state("stopped", error=Stopped(f"{artifact} is stopped", Allow(run.url, artifact)))
    return in_state("begun" if chunks else "waiting", chunks=chunks)


def with_newest_picture(statuses: Iterable[Status]) -> Status | None:
    """The model with the newest picture, without a clock: of those that train, else of all, the last step's."""
    painted = [status for status in statuses if status.picture]
    training = [status for status in painted if status.state != "finished"]
    return max(training or painted, key=lambda status: status.picture or (0, ""), default=None)


def survey(run: Run, known: Iterable[Status] = ()) -> list[Status]:
    """The statuses of a run's artifacts, in the order in which they are made. Missing and short files are noticed.

    Kinds that aren't `surveyed` are left out. Artifacts that are finished in `known`, an earlier survey, aren't read
    again. Optional ones are included once they have begun.
    """
    artifacts = inventory(run, surveyed=True)
    finished = {
        earlier.artifact: earlier for earlier in known if earlier.state == "finished" and not earlier.unaccepted
    }
    files = list_jobs(run.store, [each for each in artifacts if each.trains and each not in finished])

    def look(artifact: Artifact) -> Status:
        if artifact in finished:
            return finished[artifact]
        job = files.get(artifact)
        sizes = job.sizes if job else None
        return _or_damaged(run, artifact, lambda: _with_files(run, _status(run, artifact, job), sizes))

    # In parallel, since in a bucket each look is a few requests, which mostly wait.
    with ThreadPoolExecutor(REQUESTS) as pool:
        statuses = pool.map(look, artifacts)
        return [each for each in statuses if each.state != "waiting" or not KINDS[each.artifact.kind].optional]


def reread(run: Run, statuses: Iterable[Status]) -> list[Status]:
    """The statuses with new heartbeats of begun jobs. Nothing is listed."""

    def look(known: Status) -> Status:
        return status(run, known.artifact, known.job.files) if known.state == "begun" and known.job else known

    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(look, statuses))


def _with_files(run: Run, status: Status, sizes: Mapping[str, int] | None) -> Status:
    """The status; damaged if a file of a finished artifact, or of one that it lists, is missing or short.

    `sizes`: its files, if listed.
    """
    manifest = run.manifest(status.artifact) if status.state == "finished" else None
    first = _first_damage(run, manifest, sizes) if manifest else None
    if first is None:
        return status
    return Status(status.artifact, "damaged", error=first.error(run, status.artifact), run=run.url)


def _first_damage(run: Run, manifest: Manifest, sizes: Mapping[str, int] | None = None) -> Damage | None:
    """The first damage that sizes show, of charts only if nothing else is damaged; None if there is none.

    `sizes`: the artifact's files, if listed.
    """
    first = min(damages(run, manifest, sizes or None), key=lambda each: each.only_charts, default=None)
    # Again if they were listed before: the manifest may have come meanwhile.
    return _first_damage(run, manifest) if first and sizes else first


def require_sound(run: Run, artifacts: Iterable[Artifact]) -> None:
    """Raise CorruptArtifact for the first damaged one of these artifacts, and of those that unfinished ones need.

    Sizes are compared. Unfinished inputs don't count, nor does a file that only charts need.
    """
    left, seen = list(artifacts), set[Artifact]()
    files = list_jobs(run.store, [each for each in left if each.trains])
    while left:
        artifact = left.pop(0)
        if artifact in seen:
            continue
        seen.add(artifact)
        with suppress(DriftError):  # has a message of its own where the artifact is used
            if manifest := run.finished(artifact, accepted=True):
                damage = _first_damage(run, manifest, files[artifact].sizes if artifact in files else None)
                if damage and not damage.only_charts:
                    raise damage.error(run)
            else:
                left += run.inputs(artifact)
