"""Publishing: EMA weights assembled from a committed state, without any rank; in the end the job's final manifest."""

import json
import sys
from collections.abc import Iterator
from hashlib import sha256

import torch
from torch import nn

from ddm_ray.errors import DDMError
from ddm_ray.models import weights
from ddm_ray.storage.attempts import Attempt
from ddm_ray.storage.manifest import NAME, FileRecord, Identity, Manifest
from ddm_ray.storage.run import MONOLITH, ROUTER, Run
from ddm_ray.train.fragments import EMA
from ddm_ray.train.job import TrainJob
from ddm_ray.train.milestone import picture
from ddm_ray.train.state import CURVE, SavedParts, read_curve

RECENT = 100
WEIGHTS, PICTURE = "ema.safetensors", "grid.png"


class _Counted:
    """Chunks of bytes on their way to storage; afterwards `record` is that of them all."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._digest, self._bytes = chunks, sha256(), 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self._digest.update(chunk)
            self._bytes += len(chunk)
            yield chunk

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._bytes, self._digest.hexdigest())


def publish_weights(attempt: Attempt, job: TrainJob, identity: Identity, step: int) -> Manifest:
    """Commit the EMA weights, and the curve up to there, of the attempt's committed state after `step` steps."""
    store, source, prefix = attempt.store, attempt.state_prefix(step), attempt.weights_prefix(step)
    manifest = Manifest.from_json(store.read(f"{source}/{NAME}"), f"{store.url}/{source}/{NAME}")
    shapes = {name: tuple(parameter.shape) for name, parameter in _model(job).named_parameters()}
    counted = _Counted(SavedParts(store, source, manifest).whole(EMA, shapes))
    store.write_stream(f"{prefix}/{WEIGHTS}", counted)
    files = {"model.json": json.dumps(job.spec, indent=2, sort_keys=True).encode()}
    files[CURVE] = store.read(f"{source}/{CURVE}")
    for name, data in files.items():
        store.write(f"{prefix}/{name}", data)
    records = {WEIGHTS: counted.record} | {name: FileRecord.of(data) for name, data in files.items()}
    return attempt.commit_weights(step, identity, records, {"step": step})


def publish_milestone(
    run: Run, attempt: Attempt, job: TrainJob, identity: Identity, step: int, device: torch.device
) -> None:
    """Publish the EMA weights after `step` steps, and then paint what they can do beside them."""
    publish_weights(attempt, job, identity, step)
    _paint(run, attempt, job, step, device)


def publish(
    run: Run, attempt: Attempt, job: TrainJob, identity: Identity, step: int, seconds: float, device: torch.device
) -> None:
    """Commit the last state's EMA weights and, if no other attempt was first, the job's final manifest.

    `identity` is that of the rows that were loaded, whatever lies there by now.
    """
    manifest = publish_weights(attempt, job, identity, step)
    model, rows_seen = _model(job), step * job.batch
    flops = job.training_flops(step)
    prefix = attempt.weights_prefix(step).removeprefix(f"{job.artifact}/")
    losses = read_curve(run.store.read(f"{job.artifact}/{prefix}/{CURVE}"))["loss"][-RECENT:]
    info = {
        "weights": prefix,
        "step": step,
        "rows_seen": rows_seen,
        "training_flops": float(flops),
        "training_flops_per_row": flops / rows_seen,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": seconds,
        "loss": sum(losses) / len(losses),
        "attempts": attempt.number,
    }
    records = {f"{prefix}/{name}": record for name, record in manifest.files.items()}
    run.commit_records(job.artifact, records, info, identity=identity)
    _paint(run, attempt, job, step, device)


def _paint(run: Run, attempt: Attempt, job: TrainJob, step: int, device: torch.device) -> None:
    """Write PICTURE beside published weights of a denoiser. It is for looking at: without one training goes on."""
    if job.artifact == ROUTER:
        return
    prefix = attempt.weights_prefix(step)
    cluster = None if job.artifact == MONOLITH else int(job.artifact.rpartition("/")[2])
    try:
        if png := picture(run, job.spec, run.store.read(f"{prefix}/{WEIGHTS}"), cluster, device):
            run.store.write(f"{prefix}/{PICTURE}", png)
    except (DDMError, RuntimeError, MemoryError) as error:
        print(f"warning: {prefix}: no {PICTURE}: {' '.join(str(error).split())[:300]}", file=sys.stderr)


def _model(job: TrainJob) -> nn.Module:
    return weights.build(job.spec, "meta")
