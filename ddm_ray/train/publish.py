"""Publishing: EMA weights are assembled from a committed state, without other ranks; last the job is committed."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ddm_ray.errors import StorageError
from ddm_ray.jobs.attempts import PICTURE, Attempt, folders_of, step_of
from ddm_ray.jobs.attempts import WEIGHTS as FOLDER
from ddm_ray.jobs.versions import installed_versions
from ddm_ray.models import weights
from ddm_ray.models.adapters import trained_parameters
from ddm_ray.models.flops import num_parameters
from ddm_ray.run.info import TrainedInfo, WeightsInfo
from ddm_ray.run.manifest import NAME, FileRecord, Identity, Manifest, read_manifest
from ddm_ray.run.run import Run
from ddm_ray.train.heldout import last_measured
from ddm_ray.train.job import TrainJob
from ddm_ray.train.membership import Membership
from ddm_ray.train.pictures import Painter
from ddm_ray.train.state import CURVE, SavedParts, TrainProgress
from ddm_ray.train.zero_shards import EMA

if TYPE_CHECKING:
    from ddm_ray.train.engine import Engine

RECENT = 100
WEIGHTS = "ema.safetensors"


class Counted:
    """Chunks of bytes on their way to storage, made again for each retry; afterwards `record` describes the file."""

    def __init__(self, chunks: Callable[[], Iterable[bytes]]):
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        self._digest, self._bytes = sha256(), 0
        for chunk in self._chunks():
            self._digest.update(chunk)
            self._bytes += len(chunk)
            yield chunk

    def measured(self) -> FileRecord:
        """The record, by a pass over the chunks that writes nothing."""
        for _ in self:
            pass
        return self.record

    @property
    def record(self) -> FileRecord:
        """The record of what was written last."""
        return FileRecord(self._bytes, self._digest.hexdigest())


def publish_weights(
    attempt: Attempt, job: TrainJob, identity: Identity, step: int, buffers: Mapping[str, Tensor]
) -> Manifest:
    """Commit the EMA weights, and the curve up to there, of the attempt's committed state after `step` steps.

    `buffers`: tensors of the model that aren't trained. Raises CorruptArtifact for a state with other bytes than were
    saved.
    """
    store, source, prefix = attempt.store, attempt.state_prefix(step), attempt.weights_prefix(step)
    counted, files = weights_of(job, SavedParts(store, source, read_manifest(store, source)), buffers)
    store.write_stream(f"{prefix}/{WEIGHTS}", lambda: counted)
    for name, data in files.items():
        store.write(f"{prefix}/{name}", data)
    records = {WEIGHTS: counted.record} | {name: FileRecord.of(data) for name, data in files.items()}
    return attempt.commit_weights(step, identity, records, WeightsInfo(step=step))


def weights_of(job: TrainJob, saved: SavedParts, buffers: Mapping[str, Tensor]) -> tuple[Counted, dict[str, bytes]]:
    """The EMA weights of a state, and the small files that are published beside them."""
    shapes = {name: tuple(parameter.shape) for name, parameter in trained_parameters(_model(job)).items()}
    described = json.dumps(job.spec, indent=2, sort_keys=True).encode()
    counted = Counted(lambda: saved.consolidated(EMA, shapes, buffers))
    return counted, {"model.json": described, CURVE: saved.read(CURVE)}


def commit_job(
    run: Run,
    attempt: Attempt,
    job: TrainJob,
    identity: Identity,
    manifest: Manifest,
    last: TrainProgress,
    unmeasured: str = "",
) -> None:
    """Commit a job by its final manifest, with the weights of an attempt's `manifest`, if no other was first."""
    step = last.step
    rows_seen, flops = step * job.batch, job.training_flops(step)
    prefix = attempt.weights_prefix(step).removeprefix(f"{job.artifact}/")
    losses = last.curve["loss"][-RECENT:]
    info = TrainedInfo(
        weights=prefix,
        step=step,
        rows_seen=rows_seen,
        training_flops=float(flops),
        training_flops_per_row=flops / rows_seen,
        parameters=num_parameters(_model(job)),
        seconds=last.seconds,
        loss=sum(losses) / len(losses),
        attempts=attempt.number,
        versions=installed_versions(),
        heldout=last_measured(last.curve),
        unmeasured=unmeasured[:1000],
    )
    records = {f"{prefix}/{name}": record for name, record in manifest.files.items()}
    run.commit_records(job.artifact, records, info, identity=identity)


class Milestones:
    """Publishes weights of an attempt's states, each with a picture of what they can do, by a `painter`.

    The thread that commits states does it, beside training; the next state waits for it.
    """

    def __init__(self, membership: Membership, engine: "Engine", painter: Painter, keep: int | None):
        """`keep`: see `publish`."""
        self._run, self._attempt, self._job = membership.run, membership.attempt, membership.job
        # The identity of the rows that were loaded; other rows may be there by now.
        self._identity, self._keep = membership.identity, keep
        self._painter, self._buffers = painter, engine.buffers

    def publish(self, step: int) -> Manifest:
        """Publish the EMA weights after `step` steps.

        Of all published weights, these included, only the newest `keep` stay.
        """
        tried = self._was_published(step)
        manifest = publish_weights(self._attempt, self._job, self._identity, step, self._buffers)
        if self._keep is not None:
            try:
                self._attempt.drop_weights(self._keep)
            except StorageError as error:
                print(f"warning: old milestones stay: {error}", file=sys.stderr)
        if not tried and self._painter.paints:  # painting may be what ended the attempt that published these before
            prefix = self._attempt.weights_prefix(step)
            size, read = manifest.files[WEIGHTS].bytes, partial(self._run.store.read, f"{prefix}/{WEIGHTS}")
            self._painter.paint(f"{prefix}/{PICTURE}", size, read)
        return manifest

    def commit(self, manifest: Manifest, last: TrainProgress, unmeasured: str = "") -> None:
        """Commit the job's final manifest, with the weights published last, if no other attempt was first.

        `unmeasured`: why this attempt measured no held-out loss.
        """
        commit_job(self._run, self._attempt, self._job, self._identity, manifest, last, unmeasured)

    def _was_published(self, step: int) -> bool:
        """True if some attempt, usually an earlier one, has published the weights of this step."""
        folders = folders_of(self._run.store, self._job.artifact, FOLDER)
        return any(step_of(name) == step and NAME in files for (_, name), files in folders.items())


def _model(job: TrainJob) -> nn.Module:
    return weights.build(job.spec, "meta")
