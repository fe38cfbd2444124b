"""Writing of states beside training: a state is copied in memory, then a thread writes and commits it."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Self

import torch.distributed as dist

from ddm_ray.errors import StorageError, Superseded
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.run.info import StateInfo
from ddm_ray.run.manifest import FileRecord, Identity
from ddm_ray.spelling import one_line
from ddm_ray.store.refusals import may_pass
from ddm_ray.train import state
from ddm_ray.train.failures import is_lost_worker
from ddm_ray.train.ranks import decide_on_first, gather_objects
from ddm_ray.train.snapshot import Snapshot
from ddm_ray.train.state import TrainProgress
from ddm_ray.train.step_sync import Agreed

if TYPE_CHECKING:
    from ddm_ray.train.engine import Engine

MAX_REASON_LETTERS = 300
"""Longest reason, in characters, why states aren't saved, in a heartbeat."""
MAX_REFUSED_STATES = 3
"""States in a row after which training ends, each refused for a reason that doesn't pass by itself."""


@dataclass(frozen=True)
class _Pending:
    """A state that is being written, and what rank 0 does once it is committed."""

    progress: TrainProgress
    then: Callable[[], object] | None


class StateWriter:
    """One rank's part in writing an attempt's states, of which the newest `keep` are kept. A context manager.

    A thread writes. The exchange of each step says when no rank writes any more, and if one was refused: then rank 0
    commits the state, or gives it up, in its thread too.
    """

    def __init__(self, attempt: Attempt, identity: Identity, keep: int, prompt: Attempt | None = None):
        """`prompt`: the same attempt with a store of few retries, which deletes old states."""
        self._attempt, self._identity, self._keep = attempt, identity, keep
        self._prompt, self._warned_undeleted = prompt or attempt, False
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._snapshot: Snapshot | None = None
        self._pending: _Pending | None = None
        self._thread = ThreadPoolExecutor(1, "state")
        self._refused_in_a_row, self.unsaved = 0, ""
        # This starts the thread: later there may be no memory left for its stack.
        self._writes = self._commits = self._thread.submit(bool, True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # A state is of no use without a lost worker's part, or if a newer attempt goes on from its own.
        useless = error is not None and (is_lost_worker(error) or isinstance(error, Superseded))
        self.close(wait=not useless)

    @property
    def writing(self) -> bool:
        """True if this rank's part of a state is still being written."""
        return not self._writes.done()

    @property
    def refused(self) -> bool:
        """True if this rank's part couldn't be written."""
        return self._writes.done() and not self._writes.result()

    @property
    def unsavable(self) -> bool:
        """True once so many states in a row were refused for good, as for want of space, that training has to end."""
        return self._refused_in_a_row >= MAX_REFUSED_STATES

    @property
    def busy(self) -> bool:
        """True if a state is still being written or committed."""
        return self._pending is not None or not self._commits.done()

    def after(self, done: int, agreed: Agreed) -> None:
        """Commit the state that all ranks have written meanwhile; end if states can't be saved.

        StorageError, on all ranks together.
        """
        self.commit_if_written(agreed.any_rank.writing, agreed.any_rank.refused)
        if agreed.any_rank.unsavable:
            decide_on_first(lambda: self._raise_unsavable(done))

    def save(self, engine: "Engine", progress: TrainProgress, then: Callable[[], object] | None = None) -> None:
        """Copy the state; write it beside training; on rank 0, once it is committed, call `then`.

        Waits for the state before it. Every rank must call it. A refusal of storage is printed on stderr, and is in
        `unsaved` until a state is saved; on rank 0 also a refusal of another rank's part.
        """
        self._settle_together()
        self._take(engine)
        self._pending = _Pending(progress, then)
        self._writes = self._thread.submit(self._tried, lambda: self._write_shards(progress.step), progress.step)
        engine.shards.being_copied = self._snapshot

    def commit_if_written(self, writing: bool, refused: bool) -> None:
        """Commit the pending state once no rank writes, or give it up if a rank was refused.

        Both facts are those of any rank, so that all ranks call it with the same.
        """
        if writing:
            return
        pending, self._pending = self._pending, None
        if pending is None or self._rank:
            return
        step = pending.progress.step
        if refused:
            self.unsaved = self.unsaved or "another worker's part is refused"
            self._commits = self._thread.submit(self._drop, step)
        else:
            self._commits = self._thread.submit(self._tried, lambda: self._commit_or_drop(pending), step)

    def save_now(self, engine: "Engine", progress: TrainProgress, then: Callable[[], object] | None = None) -> None:
        """Save a state and wait until it is committed, and `then` done. Every rank must call it.

        StorageError, on all ranks, if one of them couldn't write or rank 0 not commit.
        """
        self._settle_together()
        self._take(engine)
        try:
            self._do_together(lambda: self._write_shards(progress.step))
        except StorageError:
            if self._rank == 0:
                self._drop(progress.step)
            raise
        self._do_together(lambda: self._commit_or_drop(_Pending(progress, then)) if self._rank == 0 else None)

    def drop_all_but(self, keep: int) -> None:
        """Delete all states but the newest; states that storage won't delete do no harm."""
        try:
            for damage in self._prompt.drop_states(keep):
                print(f"warning: {damage}; the sound state before it stays", file=sys.stderr)
        except StorageError as error:
            if not self._warned_undeleted:
                print(f"warning: old states stay: {error}", file=sys.stderr)
            self._warned_undeleted = True

    def close(self, wait: bool) -> None:
        """End the thread; `wait` until it has done its work."""
        self._thread.shutdown(wait)

    def _raise_unsavable(self, done: int) -> NoReturn:
        why = self.unsaved or "another worker's part is refused"
        raise StorageError(f"ends after step {done}, since its states can't be saved: {why}", passes=False)

    def _settle_together(self) -> None:
        """Wait, all ranks together, until the state that is being written is committed or given up."""
        self._writes.result()
        self.commit_if_written(False, any(gather_objects(self.refused)))
        self._commits.result()
        # Without it the other ranks would wait for rank 0 in the next step, where the watchdog takes it for a hang.
        dist.barrier()

    def _do_together(self, work: Callable[[], None]) -> None:
        problem: StorageError | None = None
        try:
            work()
        except Exception as error:  # any error: the other ranks wait for an answer
            problem = StorageError(one_line(error), passes=_passes(error))
        for refusal in gather_objects(problem):
            if refusal:
                raise refusal

    def _take(self, engine: "Engine") -> None:
        self._snapshot = self._snapshot or Snapshot(engine.shards.owned())
        self._snapshot.take()

    def _tried(self, work: Callable[[], None], step: int) -> bool:
        """Do this rank's part of a state; True if that succeeded, else print a warning."""
        try:
            work()
        except Exception as error:  # any error: training goes on without this state; only the last one is needed
            print(f"warning: {one_line(error)}; the state of step {step} isn't saved", file=sys.stderr)
            self.unsaved = one_line(error, MAX_REASON_LETTERS)
            self._refused_in_a_row = 0 if _passes(error) else self._refused_in_a_row + 1
            return False
        if self._rank:
            self._refused_in_a_row = 0
        return True

    def _drop(self, step: int) -> bool:
        """Delete the files of a state that won't be committed: full storage needs the room."""
        with suppress(StorageError):
            self._prompt.store.delete(self._prompt.state_prefix(step))
        return True

    def _write_shards(self, step: int) -> None:
        assert self._snapshot is not None
        rank = state.RANK.format(self._rank)
        self._snapshot.write(self._attempt.store, f"{self._attempt.state_prefix(step)}/{rank}")

    def _commit_or_drop(self, pending: _Pending) -> None:
        try:
            self._commit(pending)
        except Exception as error:
            if not _passes(error):  # after one that passes its manifest may be there all the same, or on its way
                self._drop(pending.progress.step)
            raise

    def _commit(self, pending: _Pending) -> None:
        """Commit a state that all ranks have written, do what follows it, and drop old states."""
        progress, store = pending.progress, self._attempt.store
        prefix = self._attempt.state_prefix(progress.step)
        curve = state.curve_bytes(progress.curve)
        store.write(f"{prefix}/{state.CURVE}", curve)
        records = state.written_records(store, prefix, self._world)
        sizes = store.sizes(prefix)
        if any(sizes.get(name) != record.bytes for name, record in records.items()):
            raise StorageError(f"{store.url}/{prefix}: files are gone; deleted by a newer attempt")
        info = StateInfo(step=progress.step, seconds=progress.seconds, world_size=self._world)
        self._attempt.commit_state(progress.step, self._identity, records | {state.CURVE: FileRecord.of(curve)}, info)
        self._refused_in_a_row, self.unsaved = 0, ""
        try:
            if pending.then:
                pending.then()
        except Exception as error:  # any error: the state is saved, and weights to look at mustn't cost it
            print(f"warning: {one_line(error)}; the weights of step {progress.step} aren't published", file=sys.stderr)
        self.drop_all_but(self._keep)


def _passes(error: Exception) -> bool:
    """True if the same write may succeed later, without a repair."""
    return error.passes if isinstance(error, StorageError) else may_pass(error)
