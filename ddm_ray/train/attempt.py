"""A training attempt on storage: how it begins, which state it goes on from, how it tells of itself and how it ends."""

import math
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist

from ddm_ray.errors import CorruptArtifact, DDMError, DriftError, Preempted, StorageError
from ddm_ray.placement import Placement
from ddm_ray.storage.attempts import OUT_OF_MEMORY, Attempt, claim, newest_claim, saved_states
from ddm_ray.storage.manifest import NAME, Identity, Manifest, drift
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import Store
from ddm_ray.train import state
from ddm_ray.train.engine import Engine
from ddm_ray.train.heartbeat import TRAINING, Heartbeat
from ddm_ray.train.job import TrainJob
from ddm_ray.train.saving import StateSaver, Trained
from ddm_ray.train.telemetry import Telemetry


@dataclass(frozen=True)
class _Begun:
    """What rank 0 tells all ranks: the attempt's number, states to go on from, rows to take at once."""

    number: int
    states: list[str]
    micro_batch: int


class TrainAttempt:
    """This world's try at a job; a context manager, which notes why it failed. Raises what `begin` does."""

    def __init__(self, run: Run, job: TrainJob, placement: Placement):
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        begun = self._told(lambda: _begin(run, job, placement))
        self.job, self.micro_batch = job, begun.micro_batch
        self.storage = Attempt(run.store, job.artifact, begun.number)
        self.identity: Identity = run.identity(job.artifact)
        self.saver = StateSaver(self.storage, self.identity, placement.keep_states)
        self._states = begun.states
        who = {"host": socket.gethostname(), "pid": os.getpid(), "world_size": self._world}
        how = {"micro_batch": begun.micro_batch, "zero_stage": placement.zero_stage, "steps": job.train.steps}
        self._heartbeat = Heartbeat(self.storage, who | how) if self._rank == 0 else None
        self._telemetry = Telemetry(run.store, self.storage.prefix) if self._rank == 0 else None
        self.phase("starting")

    def _told(self, decide: Callable[[], _Begun]) -> _Begun:
        told: list[_Begun | DDMError | None] = [None]
        if self._rank == 0:
            try:
                told = [decide()]
            except DDMError as error:
                told = [error]
        dist.broadcast_object_list(told)
        if isinstance(told[0], DDMError):
            raise told[0]
        assert told[0] is not None
        return told[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._fail(error)
        self.saver.close()
        if self._heartbeat and self._telemetry:
            self._heartbeat.close()
            self._telemetry.close()

    def _fail(self, error: BaseException) -> None:
        text = " ".join(str(error).split())[-500:] or type(error).__name__
        if out_of_memory(error):
            self._note(text, OUT_OF_MEMORY, final=self.micro_batch == 1)  # fewer rows at once may fit
        elif lost_worker(error):
            self._note("another worker of the group was lost, or hangs", "LostWorker", final=False)
        else:
            mendable = not isinstance(error, DDMError) or isinstance(error, StorageError | Preempted)
            self._note(text, type(error).__name__, final=not mendable)

    def stuck(self, text: str) -> None:
        """Note that this rank hangs."""
        self._note(f"rank {self._rank} on {socket.gethostname()}: {text}", "Stuck", final=False)

    def _note(self, error: str, kind: str, final: bool) -> None:
        """Note why the attempt ends, if no rank has said so before."""
        try:
            self.storage.fail({"error": error, "kind": kind, "final": final, "micro_batch": self.micro_batch})
        except StorageError as unsaid:
            print(f"warning: {unsaid}", file=sys.stderr)

    def phase(self, name: str, told: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Say what the attempt is about."""
        if self._heartbeat:
            self._heartbeat.tell(name, **told)

    def tell(self, told: dict[str, Any]) -> None:
        """Say how training goes: to the heartbeat, and to the curves."""
        self.phase(TRAINING, told)
        if self._telemetry:
            curves = ("loss", "grad_norm", "learning_rate", "samples_per_second", "mfu")
            self._telemetry.record(told["step"], {name: told[name] for name in curves})

    def resume(self, make: Callable[[], Engine]) -> tuple[Engine, Trained]:
        """An engine, and how far the newest sound state is, which it holds; without one the beginning.

        A damaged state is named on stderr and the one before it used. RuntimeError, so that another attempt is made,
        if the engine doesn't hold what the state says.
        """
        engine = make()
        for prefix in self._states:
            try:
                saved, trained = self._read(engine, prefix)
                problem = None
            except CorruptArtifact as error:
                problem = str(error)
            problems: list[str | None] = [None] * self._world
            dist.all_gather_object(problems, problem)
            if not any(problems):
                self._load(engine, saved, trained.step)
                return engine, trained
            if self._rank == 0:
                _warn_of_state(next(filter(None, problems)))
            engine = make()  # what was read so far is neither the one nor the other
        return engine, Trained(0, 0.0, {"loss": [], "grad_norm": []})

    def _read(self, engine: Engine, prefix: str) -> tuple[state.SavedParts, Trained]:
        """Read this rank's part into the engine's shards."""
        store, where = self.storage.store, f"{self.storage.store.url}/{prefix}/{NAME}"
        try:
            manifest = Manifest.from_json(store.read(f"{prefix}/{NAME}"), where)
        except FileNotFoundError:
            raise CorruptArtifact(f"{where}: dropped meanwhile by another attempt") from None
        saved = state.SavedParts(store, prefix, manifest)
        saved.fill(engine.shards.held())
        curve = state.read_curve(saved.read(state.CURVE)) if self._rank == 0 else {}
        return saved, Trained(manifest.info["step"], manifest.info["seconds"], curve)

    def _load(self, engine: Engine, saved: state.SavedParts, step: int) -> None:
        """Make the engine compute with the shards that were read, all ranks together, and check that it does."""
        engine.shards.refresh()
        engine.set_adam_step(step)
        prints: list[dict[str, int]] = [{}] * self._world
        dist.all_gather_object(prints, state.fingerprints(engine.shards.owned()))
        total = {record: sum(one[record] for one in prints) % 2**64 for record in saved.fingerprints}
        wrong = [record for record, value in saved.fingerprints.items() if total[record] != value]
        wrong += [fragment.name for fragment in engine.shards.held() if not engine.shards.computes_with(fragment)]
        if wrong:
            raise RuntimeError(f"state of step {step} didn't load: {wrong[0]} differs from what was saved")


def _begin(run: Run, job: TrainJob, placement: Placement) -> _Begun:
    """Choose what to go on from, and claim the next number. DriftError for a job begun under another configuration."""
    store, states = run.store, []
    for found in saved_states(store, job.artifact):
        if isinstance(found, CorruptArtifact):
            _warn_of_state(str(found))
        elif lines := drift(run.identity(job.artifact), found.manifest.identity):
            where = f"{run.url}/{found.prefix}"
            raise DriftError(f"{where} was made otherwise: {'; '.join(lines)}; delete {job.artifact}")
        else:
            states.append(found.prefix)
    asked = {"micro_batch": placement.micro_batch, "device": device_name()}
    most = _most_rows(store, job.artifact, asked)
    number = claim(store, job.artifact, {"asked": asked, "most_rows": most}).number
    share = math.ceil(job.batch / dist.get_world_size())
    return _Begun(number, states, min(placement.micro_batch or share, most or share, share))


def _most_rows(store: Store, job: str, asked: dict[str, Any]) -> int | None:
    """How many rows fit at once as far as earlier attempts on such a device found out; None if they didn't."""
    before = newest_claim(store, job)
    if before is None or before["asked"] != asked:
        return None
    failure = before["failure"]
    ran_out = failure is not None and failure["kind"] == OUT_OF_MEMORY
    return max(1, failure["micro_batch"] // 2) if ran_out else before["most_rows"]


def _warn_of_state(text: str) -> None:
    print(f"warning: {text}; going on from the state before it", file=sys.stderr)


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch's own error on a GPU, a RuntimeError of its allocator on a CPU."""
    said = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def lost_worker(error: BaseException) -> bool:
    """Whether a connection to another rank ended: NCCL's own error, or a RuntimeError of gloo."""
    said = isinstance(error, RuntimeError) and "gloo/" in str(error)
    return said or isinstance(error, dist.DistBackendError | dist.DistNetworkError)


def device_name() -> str:
    """What rows must fit into."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
