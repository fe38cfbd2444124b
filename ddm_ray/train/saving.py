"""Saving beside training: a state is copied in memory, then written and committed by a thread of its own."""

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeVar

import torch.distributed as dist

from ddm_ray.errors import CorruptArtifact, StorageError
from ddm_ray.storage.attempts import Attempt
from ddm_ray.storage.manifest import FileRecord, Identity
from ddm_ray.train import state
from ddm_ray.train.engine import Engine

LONGEST_POLL_SECONDS = 1.0
T = TypeVar("T")


@dataclass(frozen=True)
class Trained:
    """How far a job is: finished steps, seconds trained so far, each step's loss and gradient norm (rank 0's alone)."""

    step: int
    seconds: float
    curve: Mapping[str, Sequence[float]]


class StateSaver:
    """One rank's part in saving states of an attempt, of which the newest `keep` are kept."""

    def __init__(self, attempt: Attempt, identity: Identity, keep: int):
        self._attempt, self._identity, self._keep = attempt, identity, keep
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._snapshot: state.Snapshot | None = None
        self._written: Future[None] | None = None
        self._saving: Future[None] | None = None
        self._given_up = Event()
        self._thread = ThreadPoolExecutor(1, "state")
        self.refused = False

    @property
    def busy(self) -> bool:
        """Whether a state is still being written."""
        return self._saving is not None and not self._saving.done()

    def save(self, engine: Engine, trained: Trained, then: Callable[[], object] | None = None) -> None:
        """Copy the state and have it written beside training, and on rank 0, once it is committed, `then` be done.

        Waits for the state before it. Every rank must call it. What storage refuses is told on stderr, and `refused`.
        """
        self._settle_together()
        self._take(engine)
        self._written = self._thread.submit(self._quietly, lambda: self._write_shards(trained), trained.step)
        self._saving = self._thread.submit(self._quietly, lambda: self._commit(trained, then), trained.step)

    def save_now(self, engine: Engine, trained: Trained) -> None:
        """Save a state and wait until it is committed. Every rank must call it.

        StorageError, on all ranks, if one of them couldn't write.
        """
        self._settle_together()
        self._take(engine)
        problem: str | None = None
        try:
            self._write_shards(trained)
        except StorageError as error:
            problem = str(error)
        problems = self._told(problem)
        if any(problems):
            raise StorageError(next(filter(None, problems)))
        self._commit(trained)
        dist.barrier()

    def give_up(self) -> None:
        """Give up the state that is being written, since some rank couldn't write its part."""
        self._given_up.set()
        self._settle()
        self._given_up.clear()
        self.refused = False

    def _settle_together(self) -> None:
        """Wait until the state that is being written is committed, or has failed to be on some rank."""
        if self._written:
            self._written.result()
        # Rank 0 would wait for ever to commit what another rank couldn't write.
        if any(self._told(self.refused)):
            self.give_up()
        self._settle()

    def _settle(self) -> None:
        if self._saving:
            self._saving.result()

    def _told(self, value: T) -> list[T]:
        """The values of all ranks."""
        told: list[Any] = [None] * self._world
        dist.all_gather_object(told, value)
        return told

    def close(self) -> None:
        """End the thread; what it was writing is not waited for longer than its own writes take."""
        self._given_up.set()
        self._thread.shutdown()

    def _take(self, engine: Engine) -> None:
        self._snapshot = self._snapshot or state.Snapshot(engine.shards.owned())
        self._snapshot.take()

    def _quietly(self, write: Callable[[], None], step: int) -> None:
        if self.refused:
            return
        try:
            write()
        except (StorageError, CorruptArtifact, OSError) as error:
            # Training goes on without this state, or its weights; only the last one must be written.
            self.refused = True
            print(f"warning: {error}; the state of step {step} isn't saved or published", file=sys.stderr)

    def _write_shards(self, trained: Trained) -> None:
        assert self._snapshot is not None
        prefix = self._attempt.state_prefix(trained.step)
        self._snapshot.write(self._attempt.store, f"{prefix}/{state.RANK.format(self._rank)}")

    def _commit(self, trained: Trained, then: Callable[[], object] | None = None) -> None:
        """Rank 0: commit a state once all ranks have written theirs, unless it is given up, and drop old ones."""
        if self._rank:
            return
        store, prefix, poll = self._attempt.store, self._attempt.state_prefix(trained.step), 0.02
        while (records := state.written_records(store, prefix, self._world)) is None:
            if self._given_up.wait(poll):
                return
            poll = min(1.5 * poll, LONGEST_POLL_SECONDS)
        curve = state.curve_bytes(trained.curve)
        store.write(f"{prefix}/{state.CURVE}", curve)
        info = {"step": trained.step, "seconds": trained.seconds, "world_size": self._world}
        records |= {state.CURVE: FileRecord.of(curve)}
        self._attempt.commit_state(trained.step, self._identity, records, info)
        self._attempt.drop_states(self._keep)
        if then:
            then()
