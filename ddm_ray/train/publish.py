"""Publishing: EMA weights assembled from a committed state, without any rank; in the end the job's final manifest."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from threading import Thread
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ddm_ray.errors import StorageError
from ddm_ray.jobs.attempts import WEIGHTS as FOLDER
from ddm_ray.jobs.attempts import Attempt, folders_of, step_of
from ddm_ray.jobs.versions import versions
from ddm_ray.models import weights
from ddm_ray.run.info import TrainedInfo, WeightsInfo
from ddm_ray.run.manifest import NAME, FileRecord, Identity, Manifest, read_manifest
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import ModelKind
from ddm_ray.train.fragments import EMA
from ddm_ray.train.heldout import last_measured
from ddm_ray.train.job import TrainJob
from ddm_ray.train.preview import picture
from ddm_ray.train.saving import TrainProgress
from ddm_ray.train.state import CURVE, SavedParts

if TYPE_CHECKING:
    from ddm_ray.train.engine import Engine

RECENT = 100
# What is painted beside training: weights of at most so many bytes, on a GPU with so many times their size free. For
# its last picture a job waits so long.
PAINTED_BYTES, ROOM, PICTURE_SECONDS = 4 * 2**30, 4, 300.0
WEIGHTS, PICTURE = "ema.safetensors", "grid.png"


class _Counted:
    """Chunks of bytes on their way to storage, made anew for each way; afterwards `record` is that of them all."""

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

    `buffers` are those that the model keeps beside its parameters and doesn't train. Raises CorruptArtifact for a state
    whose bytes aren't those that were saved.
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
    """Publishes weights of an attempt's states, each with a picture of what they can do, painted beside training."""

    def __init__(
        self, run: Run, attempt: Attempt, job: TrainJob, identity: Identity, engine: "Engine", keep: int | None
    ):
        """`identity` is that of the rows that were loaded, whatever lies there by now; `keep`: see `publish`."""
        self._run, self._attempt, self._job, self._identity, self._keep = run, attempt, job, identity, keep
        self._device, self._buffers = engine.device, engine.buffers
        self._painting = Thread()

    def publish(self, step: int) -> Manifest:
        """Publish the EMA weights after `step` steps; they get no picture if the last one is still being painted.

        Of weights that were published before, all but `keep`, these included, are deleted.
        """
        tried = self._was_published(step)
        manifest = publish_weights(self._attempt, self._job, self._identity, step, self._buffers)
        if self._keep is not None:
            try:
                self._attempt.drop_weights(self._keep)
            except StorageError as error:
                print(f"warning: old milestones stay: {error}", file=sys.stderr)
        # Painting may be what ended the attempt that published it before; nobody paints texts or routers.
        if tried or self._job.artifact.kind == "router" or self._run.config.data.text is not None:
            return manifest
        if manifest.files[WEIGHTS].bytes > PAINTED_BYTES:
            print(f"warning: step {step}: no {PICTURE} of so large a model beside training", file=sys.stderr)
        elif self._painting.is_alive():
            print(f"warning: step {step}: no {PICTURE}, while that of an earlier step is painted", file=sys.stderr)
        else:
            painting = Thread(target=self._paint, args=(step,), name="picture", daemon=True)
            try:
                painting.start()
            except RuntimeError as error:  # no memory for its stack, for one
                print(f"warning: step {step}: no {PICTURE}: {error}", file=sys.stderr)
            else:
                self._painting = painting
        return manifest

    def wait(self) -> None:
        """Wait for the picture that is being painted, but not for ever."""
        if self._painting.ident:
            self._painting.join(PICTURE_SECONDS)

    def commit(self, manifest: Manifest, last: TrainProgress, unmeasured: str = "") -> None:
        """Commit the job's final manifest, of the weights last published, if no other attempt was first.

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
            versions=versions(),
            heldout=last_measured(last.curve),
            unmeasured=unmeasured[:1000],
        )
        records = {f"{prefix}/{name}": record for name, record in manifest.files.items()}
        self._run.commit_records(job.artifact, records, info, identity=self._identity)

    def _was_published(self, step: int) -> bool:
        """True if an attempt, mostly an earlier one, published the weights of this step."""
        folders = folders_of(self._run.store, self._job.artifact, FOLDER)
        return any(step_of(name) == step and NAME in files for (_, name), files in folders.items())

    def _paint(self, step: int) -> None:
        """Write PICTURE beside published weights of a denoiser. It is for looking at: without one training goes on."""
        run, artifact = self._run, self._job.artifact
        prefix = self._attempt.weights_prefix(step)
        try:
            data = run.store.read(f"{prefix}/{WEIGHTS}")
            if self._device.type == "cuda" and torch.cuda.mem_get_info(self._device)[0] < ROOM * len(data):
                raise MemoryError("training leaves too little of the GPU's memory")
            kind: ModelKind = "student" if artifact.kind == "student" else "monolith"
            png = picture(run, self._job.spec, data, artifact.cluster, self._device, kind)
            run.store.write(f"{prefix}/{PICTURE}", png)
        except Exception as error:  # a border: it must not end the thread of what counts
            print(f"warning: {prefix}: no {PICTURE}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        finally:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # it is training's


def _model(job: TrainJob) -> nn.Module:
    return weights.build(job.spec, "meta")
