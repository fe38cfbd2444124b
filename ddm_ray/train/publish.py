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
from ddm_ray.run.info import TrainedInfo, WeightsInfo
from ddm_ray.run.manifest import NAME, FileRecord, Identity, Manifest, read_manifest
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


class _Counted:
    """Chunks of bytes on their way to storage, made again for each retry; afterwards `record` describes the file."""

    def __init__(self, chunks: Callable[[], Iterable[bytes]]):
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        self._digest, self._bytes = sha256(), 0
        for chunk in self._chunks():
            self._digest.update(chunk)
            self._bytes += len(chunk)
            yield chunk

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._bytes, self._digest.hexdigest())


def publish_weights(
    attempt: Attempt, job: TrainJob, identity: Identity, step: int, buffers: Mapping[str, Tensor]
) -> Manifest:
    """Commit the EMA weights, and the curve up to there, of the attempt's committed state after `step` steps.

    `buffers`: tensors of the model that aren't trained. Raises CorruptArtifact for a state with other bytes than were
    saved.
    """
    store, source, prefix = attempt.store, attempt.state_prefix(step), attempt.weights_prefix(step)
    manifest = read_manifest(store, source)
    shapes = {name: tuple(parameter.shape) for name, parameter in _model(job).named_parameters()}
    saved = SavedParts(store, source, manifest)
    counted = _Counted(lambda: saved.consolidated(EMA, shapes, buffers))
    store.write_stream(f"{prefix}/{WEIGHTS}", lambda: counted)
    files = {"model.json": json.dumps(job.spec, indent=2, sort_keys=True).encode()}
    files[CURVE] = saved.read(CURVE)
    for name, data in files.items():
        store.write(f"{prefix}/{name}", data)
    records = {WEIGHTS: counted.record} | {name: FileRecord.of(data) for name, data in files.items()}
    return attempt.commit_weights(step, identity, records, WeightsInfo(step=step))


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
        job, step = self._job, last.step
        rows_seen, flops = step * job.batch, job.training_flops(step)
        prefix = self._attempt.weights_prefix(step).removeprefix(f"{job.artifact}/")
        losses = last.curve["loss"][-RECENT:]
        info = TrainedInfo(
            weights=prefix,
            step=step,
            rows_seen=rows_seen,
            training_flops=float(flops),
            training_flops_per_row=flops / rows_seen,
            parameters=sum(parameter.numel() for parameter in _model(job).parameters()),
            seconds=last.seconds,
            loss=sum(losses) / len(losses),
            attempts=self._attempt.number,
            versions=installed_versions(),
            heldout=last_measured(last.curve),
            unmeasured=unmeasured[:1000],
        )
        records = {f"{prefix}/{name}": record for name, record in manifest.files.items()}
        self._run.commit_records(job.artifact, records, info, identity=self._identity)

    def _was_published(self, step: int) -> bool:
        """True if some attempt, usually an earlier one, has published the weights of this step."""
        folders = folders_of(self._run.store, self._job.artifact, FOLDER)
        return any(step_of(name) == step and NAME in files for (_, name), files in folders.items())


def _model(job: TrainJob) -> nn.Module:
    return weights.build(job.spec, "meta")
