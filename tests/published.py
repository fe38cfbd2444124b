"""Weights published without training."""

from ddm_ray.jobs.attempts import Attempt
from ddm_ray.run.info import WeightsInfo
from ddm_ray.run.manifest import FileRecord, Identity, Manifest


def publish_weights(attempt: Attempt, step: int, identity: Identity, files: dict[str, bytes]) -> tuple[str, Manifest]:
    """Commit EMA weights after `step` steps; their prefix relative to the job, and manifest."""
    prefix = attempt.weights_prefix(step)
    for name, data in files.items():
        attempt.store.write(f"{prefix}/{name}", data)
    records = {name: FileRecord.of(data) for name, data in files.items()}
    return prefix.removeprefix(f"{attempt.job}/"), attempt.commit_weights(
        step, identity, records, WeightsInfo(step=step)
    )
