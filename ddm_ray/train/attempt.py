"""A training attempt on storage: how it begins, which state it goes on from, how it tells of itself and how it ends."""

import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from ddm_ray.errors import (
    CorruptArtifact,
    DDMError,
    DriftError,
    OutOfMemory,
    Preempted,
    Stopped,
    StorageError,
    Superseded,
)
from ddm_ray.jobs.attempts import OUT_OF_MEMORY, Attempt, saved_states
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.versions import versions
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.info import StateInfo
from ddm_ray.run.manifest import NAME, read_manifest
from ddm_ray.run.run import Run
from ddm_ray.spelling import one_line
from ddm_ray.store.retries import SHORT_RETRIES
from ddm_ray.store.store import Store
from ddm_ray.train import state
from ddm_ray.train.claiming import begin_attempt
from ddm_ray.train.engine import Engine
from ddm_ray.train.heartbeat import TRAINING, Heartbeat
from ddm_ray.train.job import TrainJob
from ddm_ray.train.lookout import Lookout
from ddm_ray.train.saving import StateSaver, TrainProgress
from ddm_ray.train.telemetry import Telemetry

T = TypeVar("T")
NO_MEMORY = (
    "can't allocate memory",
    *(f"{who}: out of memory" for who in ("CUDA error", "CUDA driver error", "[CUDA]")),
)
"""Words of errors that have no class of their own."""


class TrainAttempt:
    """This world's try at a job; a context manager, which notes why it failed. Raises what `begin_attempt` does."""

    def __init__(self, run: Run, job: TrainJob, placement: TrainPlacement, launch: Launch | None = None):
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        lineage = (run, *run.predecessors(job.artifact))
        started = self._from_first(lambda: begin_attempt(lineage, job, placement, launch))
        number, self.micro_batch, self.threads = started
        self.job, self._elastic = job, placement.workers.elastic
        self.storage = Attempt(run.store, job.artifact, number)
        # What it tells of itself, or deletes, isn't worth minutes of waiting.
        self._prompt_storage = Attempt(Store(run.url, SHORT_RETRIES), job.artifact, number)
        self._run, self.identity = run, run.identity(job.artifact)
        self._lineage = lineage
        self._telemetry = Telemetry(self._prompt_storage.store, self.storage.prefix) if self._rank == 0 else None
        committed = self._telemetry.upload if self._telemetry else bool
        self.saver = StateSaver(self.storage, self.identity, placement.keep_states, self._prompt_storage, committed)
        self._tried, self._told_unsaved = set[str](), ""
        who = {"host": socket.gethostname(), "pid": os.getpid(), "world_size": self._world, "versions": versions()}
        who |= launch.place if launch else {}
        how = {"zero_stage": placement.zero_stage, "steps": job.train.steps}
        self._heartbeat = Heartbeat(self._prompt_storage, who | how) if self._rank == 0 else None
        self._lookout = Lookout(self.storage, launch) if self._rank == 0 else None
        self._launch = launch
        self.phase("starting")

    def _from_first(self, decide: Callable[[], T]) -> T:
        """Decide on rank 0, and return the decision on all ranks; what it raises, all raise."""
        outcome: list[Any] = [None, None]
        if self._rank == 0:
            try:
                outcome = [decide(), None]
            except DDMError as error:
                outcome = [None, error]
            except Exception as error:  # others would wait for ever
                outcome = [None, RuntimeError(f"{type(error).__name__}: {error}")]
        dist.broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._fail(error)
        # Nobody needs a state that a lost worker has no part in, or that nobody goes on from.
        self.saver.close(wait=error is None or not (lost_worker(error) or isinstance(error, Superseded)))
        if self._heartbeat and self._telemetry and self._lookout:
            self._lookout.close()
            self._heartbeat.close()
            self._telemetry.close()

    def _fail(self, error: BaseException) -> None:
        text = one_line(error.message if isinstance(error, DDMError) else error, 500, tail=True)
        if isinstance(error, OutOfMemory):
            # Fewer may fit, or as many in more workers.
            self._note(text, OUT_OF_MEMORY, final=self.micro_batch == 1 and not self._elastic)
        elif lost_worker(error):
            self._note("another worker of the group was lost, or hangs", "LostWorker", final=False)
        else:
            mendable = not isinstance(error, DDMError) or error.passes
            # Of two launches one goes on; within one, the newer attempt is its next try.
            mendable |= isinstance(error, Superseded) and error.by_its_own_launch
            fix = error.to_fields()["fix"] if isinstance(error, DDMError) else None
            self._note(text, type(error).__name__, final=not mendable, fix=fix)

    @contextmanager
    def catch_oom(self, doing: str = "") -> Iterator[None]:
        """Turn running out of memory into OutOfMemory, which blames the rows that are taken at once; `doing` what."""
        try:
            yield
        except Exception as error:
            if out_of_memory(error):
                raise OutOfMemory(f"{doing}micro_batch {self.micro_batch}: {one_line(error, 400, tail=True)}") from None
            raise

    @property
    def overtaken(self) -> bool:
        """True once rank 0 has seen that a newer attempt has taken this one's place."""
        return bool(self._lookout and self._lookout.successor)

    def give_way(self, step: int) -> None:
        """End after `step` steps, since a newer attempt has taken over: raise Superseded, on all ranks together."""
        self._from_first(lambda: self._raise_superseded(step))

    def _raise_superseded(self, step: int) -> None:
        assert self._lookout and self._lookout.successor
        raise self._lookout.successor.error(self.storage.number, self._launch.id if self._launch else None, step)

    @property
    def stopped(self) -> bool:
        """True once rank 0 has seen that somebody asks for the end of its launch."""
        return bool(self._lookout and self._lookout.stop)

    def leave(self, step: int) -> None:
        """End after `step` steps, which are saved: raise Stopped or Preempted, on all ranks together."""
        self._from_first(lambda: self._raise_left(step))

    def _raise_left(self, step: int) -> None:
        saved = f"step {step} is saved"
        if self._lookout and (stop := self._lookout.stop):
            stopped = Stopped(f"{stop.message}; {saved}", stop.fix)
            stopped.passes = stop.passes
            raise stopped
        raise Preempted(f"{self.job.artifact}: asked to leave; {saved}")

    def end_unsaved(self, step: int) -> None:
        """End after `step` steps, of which storage keeps none for good: raise StorageError, on all ranks together."""
        self._from_first(lambda: self._raise_unsaved(step))

    def _raise_unsaved(self, step: int) -> None:
        why = self.saver.unsaved or "another worker's part is refused"
        raise StorageError(f"ends after step {step}, since its states can't be saved: {why}", passes=False)

    def tidy(self) -> None:
        """Keep the last state alone, and end the curves: the job is about to be committed."""
        self.saver.drop_all_but(1)
        if self._telemetry:
            self._telemetry.close()

    def stuck(self, text: str) -> None:
        """Note that this rank hangs."""
        self._note(f"rank {self._rank} on {socket.gethostname()}: {text}", "Stuck", final=False)

    def _note(self, error: str, kind: str, final: bool, fix: Any = None) -> None:
        """Note why the attempt ends, if no rank has said so before."""
        note = {"error": error, "kind": kind, "final": final, "micro_batch": self.micro_batch, "fix": fix}
        try:
            self._prompt_storage.fail(note)
        except StorageError as unsaid:
            print(f"warning: {unsaid}", file=sys.stderr)

    def phase(self, name: str, progress: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Say what the attempt is about."""
        if self._heartbeat:
            self._told_unsaved = self.saver.unsaved
            self._heartbeat.tell(name, micro_batch=self.micro_batch, unsaved=self._told_unsaved, **progress)

    @property
    def untold(self) -> bool:
        """True on rank 0 where it hasn't told yet that states can't be saved, or can again."""
        return self._heartbeat is not None and self.saver.unsaved != self._told_unsaved

    def tell(self, progress: dict[str, Any]) -> None:
        """Say how training goes: to the heartbeat, and to the curves."""
        self.phase(TRAINING, progress)
        if self._telemetry:
            curves = ("loss", "grad_norm", "learning_rate", "samples_per_second", "mfu")
            self._telemetry.record(progress["step"], {name: progress[name] for name in curves})
            if progress.get("heldout_step") == progress["step"]:
                self._telemetry.record(progress["step"], {"heldout_loss": progress["heldout_loss"]})

    def resume(self, make: Callable[[], Engine], begin: Callable[[], Engine]) -> tuple[Engine, TrainProgress]:
        """An engine, and how far the newest sound state is, which it holds; without one the beginning.

        `make` makes an engine to read a state into, `begin` one that holds what training begins with.
        A damaged state is named on stderr and the one before it used. StorageError if all that there were are gone:
        another attempt deletes what it has overtaken. RuntimeError if the engine doesn't hold what the state says.
        """
        engine, gone = None, False
        while (state_of := self._from_first(self._next_state)) is not None:
            generation, prefix = state_of
            store, problem = self._lineage[generation].store, None
            engine = engine or make()
            try:
                saved, trained = self._read(engine, store, prefix)
            except CorruptArtifact as error:
                problem = str(error)
            problems: list[str | None] = [None] * self._world
            dist.all_gather_object(problems, problem)
            if not any(problems):
                self._load(engine, saved, trained.step)
                return engine, trained
            if self._from_first(lambda store=store, prefix=prefix: store.exists(f"{prefix}/{NAME}")):  # type: ignore[misc]
                self._warn_of_state(next(filter(None, problems)))
            else:
                gone = True
        if gone:
            raise StorageError(f"{self.job.artifact}: its states were deleted while they were read")
        if engine:
            # What was read so far is neither the one nor the other. Not two at once: one may fill the memory.
            engine.close()
            del engine
            gc.collect()
        return begin(), TrainProgress(0, 0.0, {"loss": [], "grad_norm": []})

    def _next_state(self) -> tuple[int, str] | None:
        """Of the states there are now the best that wasn't tried, and whose of the lineage it is.

        Those of the runs that this one extends come after its own. DriftError for one of another configuration.
        """
        for generation, run in enumerate(self._lineage):
            identity = self.identity if run is self._run else run.identity(self.job.artifact)
            for saved in saved_states(run.store, self.job.artifact):
                if isinstance(saved, CorruptArtifact):
                    self._warn_of_state(str(saved))
                elif (where := f"{run.store.url}/{saved.prefix}") not in self._tried:
                    if lines := run.drift(self.job.artifact, saved.manifest.identity, identity):
                        raise DriftError(f"{where} was made otherwise: {'; '.join(lines)}; delete {self.job.artifact}")
                    self._tried.add(where)
                    return generation, saved.prefix
        return None

    def _warn_of_state(self, text: str) -> None:
        if self._rank == 0 and text not in self._tried:
            self._tried.add(text)
            print(f"warning: {text}; going on from the state before it", file=sys.stderr)

    def _read(self, engine: Engine, store: Store, prefix: str) -> tuple[state.SavedParts, TrainProgress]:
        """Read this rank's part into the engine's shards."""
        where = f"{store.url}/{prefix}/{NAME}"
        try:
            manifest = read_manifest(store, prefix)
        except FileNotFoundError:
            raise CorruptArtifact(f"{where}: gone") from None
        saved = state.SavedParts(store, prefix, manifest)
        saved.fill(engine.shards.held())
        curve = state.read_curve(saved.read(state.CURVE)) if self._rank == 0 else {}
        info = StateInfo.of(manifest)
        return saved, TrainProgress(info.step, info.seconds, curve)

    def _load(self, engine: Engine, saved: state.SavedParts, step: int) -> None:
        """Make the engine compute with the shards that were read, all ranks together, and check that it does."""
        engine.shards.refresh()
        engine.set_adam_step(step)
        prints: list[dict[str, int]] = [{}] * self._world
        dist.all_gather_object(prints, state.fingerprints(engine.shards.owned()))
        total = {record: sum(one[record] for one in prints) % 2**64 for record in saved.fingerprints}
        wrong = [record for record, value in saved.fingerprints.items() if total[record] != value]
        wrong += engine.shards.computing_otherwise()
        if wrong:
            raise RuntimeError(f"state of step {step} didn't load: {wrong[0]} differs from what was saved")


def out_of_memory(error: BaseException) -> bool:
    """True if an allocation failed: torch's own error on a GPU, a RuntimeError of a CPU's allocator, or of a driver.

    Also where it is a compiler that met it.
    """
    error = getattr(error, "inner_exception", error)
    by_words = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return by_words or isinstance(error, torch.OutOfMemoryError | MemoryError)


def lost_worker(error: BaseException) -> bool:
    """True if a connection to another rank ended: NCCL's own error, or a RuntimeError of gloo."""
    of_gloo = isinstance(error, RuntimeError) and "gloo/" in str(error)
    return of_gloo or isinstance(error, dist.DistBackendError | dist.DistNetworkError)
