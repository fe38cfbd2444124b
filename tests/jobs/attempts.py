"""What a training job's attempts leave on storage, written the way they write it."""

import json
import os
from pathlib import Path
from typing import Any

from ddm_ray.jobs.attempts import Attempt
from ddm_ray.run.graph import Artifact
from ddm_ray.run.manifest import NAME, Identity, Manifest
from ddm_ray.run.run import Run
from tests.infos import commit_written, info_of
from tests.published import publish_weights

TOLD = {
    "phase": "training",
    "first": 0,
    "loss": 0.12345,
    "grad_norm": 0.5,
    "learning_rate": 1e-3,
    "steps_per_second": 12.5,
    "samples_per_second": 200.0,
    "mfu": 0.41,
    "world_size": 2,
    "micro_batch": 8,
    "zero_stage": 1,
    "host": "north",
    "pid": 7,
}


def beat(attempt: Attempt, number: int, step: int, steps: int = 300, **fields: Any) -> None:
    """The heartbeat `number` of an attempt that trains; `fields` in place of what TOLD says."""
    attempt.beat({"beat": number, "step": step, "steps": steps, **TOLD, **fields})


def fail(attempt: Attempt, error: str, final: bool = False) -> None:
    """The record of an attempt that an exception ended."""
    record = {"error": error, "kind": "TrainingError", "final": final}
    attempt.store.write(f"{attempt.prefix}/FAILED", json.dumps(record).encode())


def publish(attempt: Attempt, step: int) -> None:
    """A milestone."""
    publish_weights(attempt, step, Identity({}), {"ema.safetensors": b"ema"})


def save(attempt: Attempt, step: int) -> None:
    """A training state to go on from."""
    prefix = f"{attempt.prefix}/state/step-{step:09d}"
    attempt.store.write(f"{prefix}/{NAME}", Manifest(prefix, Identity({}), {}, {}).to_json())


def finish(run: Run, artifact: Artifact) -> None:
    """The commit of a job, of whatever was trained."""
    run.store.write(f"{artifact}/attempts/0001/weights/x", b"x")
    info = {"step": 300, "loss": 0.25, "training_flops": 1e9, "attempts": 1}
    commit_written(run, artifact, ["attempts/0001/weights/x"], info_of(artifact, **info))


def age(folder: Path, seconds: float) -> None:
    """Make every file below a folder so much older than it is."""
    for path in folder.rglob("*"):
        if path.is_file():
            then = path.stat().st_mtime - seconds
            os.utime(path, (then, then))
