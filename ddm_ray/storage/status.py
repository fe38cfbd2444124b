"""What of a run is done, begun, failed or waiting, read from storage alone. Clocks are for display."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.storage.progress import Progress, progress
from ddm_ray.storage.records import rows_progress
from ddm_ray.storage.run import EVALUATIONS, MONOLITH, PARTITION, ROUTER, ROWS, Run, shard

SILENT_SECONDS = 10.0
"""From here on a job is said to be silent: it beats once a second, or step by step where these take longer."""
LOOKS = 8


@dataclass(frozen=True)
class Status:
    """One artifact: `info` of its manifest when finished, of rows that are begun how far they are (`rows_progress`);
    `progress` of a training job that is begun or failed, `command` the one that makes the artifact.

    Failed is a job whose newest attempt did: mostly the next is about to begin. Damaged is what can't be read or was
    made otherwise; `info["error"]` says why.
    """

    artifact: str
    state: Literal["finished", "begun", "failed", "waiting", "damaged"]
    info: dict[str, Any]
    progress: Progress | None = None
    command: str = ""

    @property
    def fraction(self) -> float:
        """How much of it is done, 0 to 1; only what is committed is wholly done."""
        if self.state == "finished":
            return 1.0
        if "units" in self.info:
            return min(0.99, self.info["units_done"] / max(1, self.info["units"]))
        return min(0.99, self.progress.step / self.progress.steps) if self.progress and self.progress.steps else 0.0

    @property
    def silent(self) -> bool:
        """Whether it is begun and has given no sign for so long that it may be dead."""
        job = self.progress if self.state == "begun" else None
        return bool(job and job.silent_seconds is not None and job.silent_seconds > job.patience(SILENT_SECONDS))

    @property
    def seconds_left(self) -> float | None:
        """Time left at the last known speed; None where there is none."""
        rate = self.progress.value("steps_per_second") if self.progress and self.state == "begun" else None
        if not self.progress or not rate or self.progress.steps is None or self.silent:
            return None
        return (self.progress.steps - self.progress.step) / rate


def status(run: Run, artifact: str) -> Status:
    """The status of one artifact."""
    command = run.command(artifact)
    kind = artifact.split("/")[0]
    try:
        manifest = run.finished(artifact)
        if manifest:
            return Status(artifact, "finished", manifest.info, None, command)
        begun = (rows_progress(run.store, artifact) if kind == ROWS else None) or {}
        job = None if kind in (ROWS, PARTITION, EVALUATIONS) else progress(run.store, artifact)
    except (DriftError, CorruptArtifact) as error:
        return Status(artifact, "damaged", {"error": str(error)}, None, command)
    if job:
        return Status(artifact, "failed" if job.failure and not job.left else "begun", {}, job, command)
    return Status(artifact, "begun" if begun else "waiting", begun, None, command)


def survey(run: Run, known: Iterable[Status] = ()) -> list[Status]:
    """All artifacts of a run, in the order in which they are made; a file gone or cut short is noticed.

    Those that are finished in `known`, an earlier survey, aren't looked at again.
    """
    evaluations = [f"{EVALUATIONS}/{name}" for name in run.store.folders(EVALUATIONS)]
    given = run.config.partition.method == "given"
    shards = [shard(cluster) for cluster in range(len(run.experts))] if given else []
    artifacts = [*run.rows, *shards, PARTITION, *run.experts, ROUTER, MONOLITH, *evaluations]
    finished = {found.artifact: found for found in known if found.state == "finished"}

    def look(artifact: str) -> Status:
        return finished.get(artifact) or _with_files(run, status(run, artifact))

    # Side by side: in a bucket each look is a few requests, which mostly wait.
    with ThreadPoolExecutor(LOOKS) as pool:
        return list(pool.map(look, artifacts))


def _with_files(run: Run, found: Status) -> Status:
    manifest = run.manifest(found.artifact) if found.state == "finished" else None
    sizes = run.store.sizes(found.artifact) if manifest else {}
    if manifest and "/cluster=" in found.artifact and not sizes.keys() & manifest.files.keys():
        return found  # an owner's, who gave its manifest alone
    for name, record in manifest.files.items() if manifest else ():
        if sizes.get(name) != record.bytes:
            error = f"{name} is gone or cut short; {run.anew(found.artifact)}"
            return Status(found.artifact, "damaged", {"error": error}, None, found.command)
    return found


def line(found: Status) -> str:
    """One line of a table on an artifact: its name, its state, how much of it is done, `describe`."""
    return f"{found.artifact:<14} {found.state:<9} {found.fraction:4.0%}  {describe(found)}"


def describe(found: Status) -> str:
    """One line on an artifact: for a training job its step, loss, speed and time left, or why it failed."""
    info = found.info
    if found.state == "finished" and "training_flops" in info:
        return f"{info['step']} steps, loss {info['loss']:.4f}, {info['training_flops'] / 1e9:.1f} GFLOP"
    if found.state == "finished":
        told = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in info.items()}
        return ", ".join(f"{key} {value}" for key, value in told.items() if isinstance(value, int | str))
    if found.state == "damaged":
        return info["error"]
    if found.progress:
        return _failed(found, found.progress) if found.state == "failed" else _begun(found, found.progress)
    if "units" in info:
        return f"{info['units_done']} of {info['units']} units of the source, {info['parts']} parts"
    return "waiting"


def _failed(found: Status, job: Progress) -> str:
    assert job.failure
    reached = [f"at step {job.step}/{job.steps}"] if job.steps else []
    told = ", ".join([f"failed: {job.failure['error']}", f"attempt {job.attempt}", *reached])
    return f"{told}; {'once that is mended, ' if job.failure['final'] else ''}{_goes_on(found, job)}"


def _begun(found: Status, job: Progress) -> str:
    where = f"step {job.step}/{job.steps}" if job.steps else ""
    if job.phase != "training":
        where = f"{job.phase} at {where}" if where else job.phase
    if found.silent and job.silent_seconds is not None:
        # First, where no narrow terminal cuts it off: a job that may be dead mustn't look alive.
        where = f"silent for {duration(job.silent_seconds)}" + (f", {where}" if where else "")
    loss, workers = job.value("loss"), job.value("world_size")
    rate, mfu = (job.value(name) for name in ("steps_per_second", "mfu"))
    moves = job.phase == "training" and not found.silent
    parts = {
        where: where,
        f"loss {loss or 0:.4f}": loss is not None and job.phase != "starting",
        f"{rate or 0:.3g} steps/s": rate and moves,
        f"{duration(found.seconds_left or 0)} left": found.seconds_left is not None and moves,
        f"{workers or 0:g} worker{'s' if workers != 1 else ''}": workers,
        f"MFU {mfu or 0:.0%}": mfu is not None and moves,
        f"weights of step {job.milestone}": job.milestone,
        f"saved at step {job.saved}": job.saved and moves,
        f"attempt {job.attempt}": True,
    }
    told = ", ".join(part for part, known in parts.items() if known)
    return f"{told}; if it died, {_goes_on(found, job)}" if found.silent else told


def _goes_on(found: Status, job: Progress) -> str:
    then = f"goes on from step {job.saved}" if job.saved else "begins again"
    return f"`{found.command}`, with its --islands and --island, {then}"


def duration(seconds: float) -> str:
    """A time for people: seconds up to ten minutes, then minutes, hours, days."""
    for unit, size, most in (("s", 1, 600), ("min", 60, 7200), ("h", 3600, 48 * 3600)):
        if seconds < most:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.1f} days"
