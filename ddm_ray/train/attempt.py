"""What a training attempt does with storage: begin, go on from a state, beat, save, publish. Rank 0 writes."""

import os
import socket
import sys
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.models import weights
from ddm_ray.models.flops import training_flops_per_row
from ddm_ray.storage.attempts import Attempt, SavedState, claim, saved_states
from ddm_ray.storage.manifest import NAME, Identity, Manifest, drift, verify
from ddm_ray.storage.run import Run
from ddm_ray.train import state
from ddm_ray.train.job import TrainJob


@dataclass(frozen=True)
class Saved:
    """A state to go on from: finished steps, seconds trained so far, the last steps' losses, fp32 tensors."""

    step: int
    seconds: float
    losses: list[float]
    tensors: dict[str, Tensor]


class TrainAttempt:
    """This world's try at a job: rank 0's methods write below the attempt's prefix, other ranks' do nothing."""

    def __init__(self, run: Run, storage: Attempt, saved_prefix: str | None):
        self.run, self.storage, self.saved_prefix = run, storage, saved_prefix
        self._identity: Identity = run.identity(storage.job)
        self._writes = dist.get_rank() == 0
        self._beats = 0
        self._first_step = 0

    def beat(self, done: int, steps: int, loss: float, steps_per_second: float) -> None:
        """Say how far training is; `loss` is rank 0's mean over recent steps."""
        if not self._writes:
            return
        self._beats += 1
        self.storage.beat(
            {
                "beat": self._beats,
                "step": done,
                "steps": steps,
                "loss": loss,
                "steps_per_second": steps_per_second,
                "host": socket.gethostname(),
                "pid": os.getpid(),
            }
        )

    def save(self, step: int, tensors: dict[str, Tensor], seconds: float, losses: list[float]) -> None:
        """Commit a training state."""
        if self._writes:
            files = {state.FILE: state.to_bytes(tensors)}
            self.storage.save_state(step, self._identity, files, {"seconds": seconds, "losses": losses})

    def publish(self, job: TrainJob, tensors: dict[str, Tensor], loss: float, seconds: float) -> None:
        """Commit the EMA weights and, if no other attempt was first, the job's final manifest."""
        if not self._writes:
            return
        ema = {key.removeprefix("ema/"): tensor for key, tensor in tensors.items() if key.startswith("ema/")}
        data, spec = weights.to_bytes(ema, job.spec)
        files = {"ema.safetensors": data, "model.json": spec.encode()}
        steps = job.train.steps
        prefix, manifest = self.storage.publish_weights(steps, self._identity, files, {"step": steps})
        flops = training_flops_per_row(weights.build(job.spec, "meta"), job.image_shape, job.text_tokens)
        rows_seen = steps * job.batch
        info = {
            "weights": prefix,
            "step": steps,
            "rows_seen": rows_seen,
            "training_flops": float(flops * rows_seen),
            "training_flops_per_row": float(flops),
            "parameters": sum(tensor.numel() for tensor in ema.values()),
            "seconds": seconds,
            "loss": loss,
            "attempts": self.storage.number,
        }
        records = {f"{prefix}/{name}": record for name, record in manifest.files.items()}
        # Of the rows that were loaded, whatever lies there by now.
        self.run.commit_records(job.artifact, records, info, identity=self._identity)


def begin(run: Run, artifact: str) -> TrainAttempt:
    """Rank 0 claims the next number and picks the newest verified state; all ranks are told.

    A damaged state is named on stderr and the one before it is used. Raises DriftError.
    """
    told: list[tuple[int, str | None]] = [(0, None)]
    if dist.get_rank() == 0:
        saved = _newest_state(run, artifact)
        told = [(claim(run.store, artifact).number, saved.prefix if saved else None)]
    dist.broadcast_object_list(told)
    number, prefix = told[0]
    return TrainAttempt(run, Attempt(run.store, artifact, number), prefix)


def _newest_state(run: Run, artifact: str) -> SavedState | None:
    for found in saved_states(run.store, artifact):
        if isinstance(found, CorruptArtifact):
            print(f"warning: {found}; going on from the state before it", file=sys.stderr)
            continue
        if lines := drift(run.identity(artifact), found.manifest.identity):
            raise DriftError(f"{run.url}/{found.prefix} was made otherwise: {'; '.join(lines)}; delete {artifact}")
        return found
    return None


def load_saved(attempt: TrainAttempt, model: nn.Module) -> Saved | None:
    """The state to go on from, its values already in `model`; None at the very beginning."""
    if attempt.saved_prefix is None:
        return None
    store, prefix = attempt.run.store, attempt.saved_prefix
    manifest = Manifest.from_json(store.read(f"{prefix}/{NAME}"), f"{store.url}/{prefix}/{NAME}")
    where = f"{store.url}/{prefix}/{state.FILE}"
    data = verify(store.read(f"{prefix}/{state.FILE}"), manifest.files[state.FILE], where)
    tensors = state.from_bytes(data, model, where)
    state.load_values(model, tensors)
    step = int(prefix.rpartition("step-")[2])
    return Saved(step, manifest.info["seconds"], manifest.info["losses"], tensors)
