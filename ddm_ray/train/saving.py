"""Saving beside training: a state is copied in memory, then written and committed by a thread of its own."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ddm_ray.errors import StorageError
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.run.info import StateInfo
from ddm_ray.run.manifest import FileRecord, Identity
from ddm_ray.spelling import one_line
from ddm_ray.store.refusals import may_pass
from ddm_ray.train import state
from ddm_ray.train.snapshot import Snapshot

if TYPE_CHECKING:
    from ddm_ray.train.engine import Engine

T = TypeVar("T")
YOUNG_SECONDS = 5.0
"""Time after which an attempt's first state is due."""
MOST_LETTERS = 300
"""Letters of the reason why states aren't saved that a heartbeat tells."""
MOST_REFUSED = 3
"""States in a row, refused for what somebody must mend, after which training ends."""


@dataclass(frozen=True)
class TrainProgress:
    """Progress of a job: finished steps, seconds trained, each step's loss and gradient norm (rank 0's alone)."""

    step: int
    seconds: float
    curve: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class _Pending:
    """A state that is being written, and what is to be done on rank 0 once it is committed."""

    trained: TrainProgress
    then: Callable[[], object] | None


class SaveClock:
    """Says when a state is due by the clock: `minutes` after the one before, sooner in an attempt's first minutes.

    With `young` it is due then once half of the time up to the last one, and YOUNG_SECONDS, have passed: who stops what
    has just begun loses a third of it. A large state is due more seldom then: it is written for a tenth of the time at
    most. An infinite number of minutes is none. Times are readings of one clock in seconds.
    """

    def __init__(self, minutes: float, now: float, young: bool = True):
        self._youngest = YOUNG_SECONDS if young else math.inf
        self._most, self._began, self._saved = 60 * minutes, now, now
        self._took: float | None = 0.0

    def due(self, now: float) -> bool:
        """True if a state is to be saved; never while one is being written."""
        if self._took is None:
            return False
        young = max(self._youngest, (self._saved - self._began) / 2, 10 * self._took)
        return math.isfinite(self._most) and now - self._saved >= min(self._most, young)

    def saved(self, now: float) -> None:
        """Note that one is being saved."""
        self._saved, self._took = now, None

    def written(self, now: float) -> None:
        """Note that none is being written."""
        if self._took is None:
            self._took = now - self._saved


class StateSaver:
    """One rank's part in saving states of an attempt, of which the newest `keep` are kept.

    A thread writes. That no rank writes any more, and that none was refused, is what the training loop's exchanges
    say; rank 0 then commits, in its thread too.
    """

    def __init__(
        self,
        attempt: Attempt,
        identity: Identity,
        keep: int,
        prompt: Attempt | None = None,
        committed: Callable[[], object] = lambda: None,
    ):
        """`prompt`: the attempt by a store with little patience, which old states are deleted through.

        `committed` is called on rank 0 after each state.
        """
        self._attempt, self._identity, self._keep, self._committed = attempt, identity, keep, committed
        self._prompt, self._told_undeleted = prompt or attempt, False
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._snapshot: Snapshot | None = None
        self._pending: _Pending | None = None
        self._thread = ThreadPoolExecutor(1, "state")
        self._refused_in_a_row, self.unsaved = 0, ""
        # Starts the thread: later there may be no memory for its stack.
        self._writes = self._commits = self._thread.submit(bool, True)

    @property
    def writing(self) -> bool:
        """True if this rank's part of a state is still being written."""
        return not self._writes.done()

    @property
    def refused(self) -> bool:
        """True if this rank's part couldn't be written."""
        return self._writes.done() and not self._writes.result()

    @property
    def hopeless(self) -> bool:
        """True once so many states in a row were refused for good, as for want of space, that training is to end."""
        return self._refused_in_a_row >= MOST_REFUSED

    @property
    def busy(self) -> bool:
        """True if a state is still being written or committed."""
        return self._pending is not None or not self._commits.done()

    def save(self, engine: "Engine", trained: TrainProgress, then: Callable[[], object] | None = None) -> None:
        """Copy the state and have it written beside training, and on rank 0, once it is committed, `then` be done.

        Waits for the state before it. Every rank must call it. What storage refuses is told on stderr, and in
        `unsaved` until a state is saved: why those since the last one aren't, on rank 0 also of other ranks.
        """
        self._settle_together()
        self._take(engine)
        self._pending = _Pending(trained, then)
        self._writes = self._thread.submit(self._tried, lambda: self._write_shards(trained.step), trained.step)
        engine.shards.being_copied = self._snapshot

    def go_on(self, writing: bool, refused: bool) -> None:
        """Commit, or give up, what was written, once no rank writes; both are said of all ranks, to all alike."""
        if writing:
            return
        pending, self._pending = self._pending, None
        if pending is None or self._rank:
            return
        if refused:
            self.unsaved = self.unsaved or "another worker's part is refused"
            self._commits = self._thread.submit(self._drop, pending.trained.step)
        else:
            self._commits = self._thread.submit(
                self._tried, lambda: self._commit_or_drop(pending), pending.trained.step
            )

    def save_now(self, engine: "Engine", trained: TrainProgress) -> None:
        """Save a state and wait until it is committed. Every rank must call it.

        StorageError, on all ranks, if one of them couldn't write or rank 0 not commit.
        """
        self._settle_together()
        self._take(engine)
        try:
            self._do_together(lambda: self._write_shards(trained.step))
        except StorageError:
            if self._rank == 0:
                self._drop(trained.step)
            raise
        self._do_together(lambda: self._commit_or_drop(_Pending(trained, None)) if self._rank == 0 else None)

    def drop_all_but(self, keep: int) -> None:
        """Delete states but the newest; those that storage won't delete are in nobody's way."""
        try:
            for damage in self._prompt.drop_states(keep):
                print(f"warning: {damage}; the sound state before it stays", file=sys.stderr)
        except StorageError as error:
            if not self._told_undeleted:
                print(f"warning: old states stay: {error}", file=sys.stderr)
            self._told_undeleted = True

    def close(self, wait: bool) -> None:
        """End the thread; `wait` for what it is about."""
        self._thread.shutdown(wait)

    def _settle_together(self) -> None:
        """Wait, all ranks together, until the state that is being written is committed or given up."""
        self._writes.result()
        self.go_on(False, any(self._gathered(self.refused)))
        self._commits.result()
        # Else the others would wait for rank 0 in the next step, where waiting is taken for a hang.
        dist.barrier()

    def _do_together(self, work: Callable[[], None]) -> None:
        problem: StorageError | None = None
        try:
            work()
        except Exception as error:  # a border: the others wait to hear of it
            problem = StorageError(one_line(error), passes=_passes(error))
        for refusal in self._gathered(problem):
            if refusal:
                raise refusal

    def _gathered(self, value: T) -> list[T]:
        """The values of all ranks."""
        values: list[Any] = [None] * self._world
        dist.all_gather_object(values, value)
        return values

    def _take(self, engine: "Engine") -> None:
        self._snapshot = self._snapshot or Snapshot(engine.shards.owned())
        self._snapshot.take()

    def _tried(self, work: Callable[[], None], step: int) -> bool:
        """Do this rank's part of a state; True if it could be done, else a warning is printed."""
        try:
            work()
        except Exception as error:  # a border: training goes on without it; only the last state must be written
            print(f"warning: {one_line(error)}; the state of step {step} isn't saved", file=sys.stderr)
            self.unsaved = one_line(error, MOST_LETTERS)
            self._refused_in_a_row = 0 if _passes(error) else self._refused_in_a_row + 1
            return False
        if self._rank:
            self._refused_in_a_row = 0
        return True

    def _drop(self, step: int) -> bool:
        """Delete what was written of a state that won't be committed; where storage is full, others need the room."""
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
            if not _passes(error):  # else its manifest may have been heeded, or be on its way
                self._drop(pending.trained.step)
            raise

    def _commit(self, pending: _Pending) -> None:
        """Commit a state that all ranks have written, do what is to follow, and drop old ones."""
        trained, store = pending.trained, self._attempt.store
        prefix = self._attempt.state_prefix(trained.step)
        curve = state.curve_bytes(trained.curve)
        store.write(f"{prefix}/{state.CURVE}", curve)
        records = state.written_records(store, prefix, self._world)
        sizes = store.sizes(prefix)
        if any(sizes.get(name) != record.bytes for name, record in records.items()):
            raise StorageError(f"{store.url}/{prefix}: files are gone; deleted by a newer attempt")
        info = StateInfo(step=trained.step, seconds=trained.seconds, world_size=self._world)
        self._attempt.commit_state(trained.step, self._identity, records | {state.CURVE: FileRecord.of(curve)}, info)
        self._refused_in_a_row, self.unsaved = 0, ""
        self._committed()
        try:
            if pending.then:
                pending.then()
        except Exception as error:  # a border: what is to be looked at meanwhile must not cost the state
            print(f"warning: {one_line(error)}; the weights of step {trained.step} aren't published", file=sys.stderr)
        self.drop_all_but(self._keep)


def _passes(error: Exception) -> bool:
    """True if the same may be taken later, with nothing mended."""
    return error.passes if isinstance(error, StorageError) else may_pass(error)
