"""What of a run is done, begun or waiting, read from storage alone."""

from dataclasses import dataclass
from typing import Any, Literal

from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.storage.attempts import heartbeat
from ddm_ray.storage.records import rows_progress
from ddm_ray.storage.run import EVALUATIONS, MONOLITH, PARTITION, ROUTER, ROWS, Run, shard


@dataclass(frozen=True)
class Status:
    """One artifact: `info` of its manifest when finished, of rows that are begun how far they are (`rows_progress`);
    of a begun training job its last heartbeat.

    Damaged is what can't be read or was made otherwise; `info["error"]` says why.
    """

    artifact: str
    state: Literal["finished", "begun", "waiting", "damaged"]
    info: dict[str, Any]
    heartbeat: dict[str, Any]

    @property
    def fraction(self) -> float:
        """How much of it is done, 0 to 1; only what is committed is wholly done."""
        if self.state == "finished":
            return 1.0
        if "units" in self.info:
            return min(0.99, self.info["units_done"] / max(1, self.info["units"]))
        return min(0.99, self.heartbeat["step"] / self.heartbeat["steps"]) if self.heartbeat else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Time left at the last known speed; None where there is none."""
        rate = self.heartbeat.get("steps_per_second", 0.0)
        return (self.heartbeat["steps"] - self.heartbeat["step"]) / rate if rate else None


def status(run: Run, artifact: str) -> Status:
    """The status of one artifact."""
    try:
        manifest = run.finished(artifact)
        rows = artifact.split("/")[0] == ROWS and manifest is None
        begun = (rows_progress(run.store, artifact) if rows else None) or {}
        beat = heartbeat(run.store, artifact) or {}
    except (DriftError, CorruptArtifact) as error:
        return Status(artifact, "damaged", {"error": str(error)}, {})
    if manifest:
        return Status(artifact, "finished", manifest.info, beat)
    return Status(artifact, "begun" if beat or begun else "waiting", begun, beat)


def survey(run: Run) -> list[Status]:
    """All artifacts of a run, in the order in which they are made; a file gone or cut short is noticed."""
    evaluations = [f"{EVALUATIONS}/{name}" for name in run.store.folders(EVALUATIONS)]
    given = run.config.partition.method == "given"
    shards = [shard(cluster) for cluster in range(len(run.experts))] if given else []
    artifacts = [*run.rows, *shards, PARTITION, *run.experts, ROUTER, MONOLITH, *evaluations]
    return [_with_files(run, status(run, artifact)) for artifact in artifacts]


def _with_files(run: Run, found: Status) -> Status:
    manifest = run.manifest(found.artifact) if found.state == "finished" else None
    sizes = run.store.sizes(found.artifact) if manifest else {}
    if manifest and "/cluster=" in found.artifact and not sizes.keys() & manifest.files.keys():
        return found  # an owner's, who gave its manifest alone
    for name, record in manifest.files.items() if manifest else ():
        if sizes.get(name) != record.bytes:
            error = f"{name} is gone or cut short; {run.anew(found.artifact)}"
            return Status(found.artifact, "damaged", {"error": error}, {})
    return found


def describe(found: Status) -> str:
    """One line on an artifact: for a training job its step, loss, speed and time left."""
    beat, info = found.heartbeat, found.info
    if found.state == "finished" and "training_flops" in info:
        return f"{info['step']} steps, loss {info['loss']:.4f}, {info['training_flops'] / 1e9:.1f} GFLOP"
    if found.state == "finished":
        told = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in info.items()}
        return ", ".join(f"{key} {value}" for key, value in told.items() if isinstance(value, int | str))
    if found.state == "damaged":
        return info["error"]
    if found.state == "waiting":
        return "waiting"
    if "units" in info:
        return f"{info['units_done']} of {info['units']} units of the source, {info['parts']} parts"
    left = f", {found.seconds_left:.0f} s left" if found.seconds_left is not None else ""
    return (
        f"step {beat['step']}/{beat['steps']}, loss {beat['loss']:.4f}, {beat['steps_per_second']:.0f} steps/s"
        f"{left}, attempt {beat['attempt']}"
    )
