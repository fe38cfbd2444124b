"""Continuous batching: rows of many requests form one batch, and join and leave it between velocities.

No Ray, no HTTP. An engine needs networks, or a way to call them. Shapes: B rows, K experts.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from ddm_ray.errors import DDMError, ServeError
from ddm_ray.sampling.request import ExpertCall, NetworkCall
from ddm_ray.sampling.state import Trajectories, require_finite_result
from ddm_ray.sampling.trajectory import advance, next_calls, turned
from ddm_ray.serve.engine.batch import JobRows, Pace, RowBatch, joined_call, network_rows_B, rows_each
from ddm_ray.serve.engine.engine_thread import STOPS, EngineThread
from ddm_ray.serve.engine.runner import DeadlineError, ExpertError, Segment
from ddm_ray.serve.engine.scheduler import MAX_TIMEOUT_S, Job, OverloadedError, Scheduler

Answer = Callable[[Sequence[NetworkCall]], list[Tensor]]
"""Answers of networks to calls, in their order."""


TIMEOUT_FACTOR, MIN_TIMEOUT_S = 10.0, 10.0
"""Time of a request that names none: so many times what it takes alone, and at least so many seconds."""
MAX_FAILURES = 3
"""Velocities in a row that fail by no fault of a request, after which the engine counts as broken."""


class BatchEngine(EngineThread):
    """A batch in a thread of its own; rows join and leave it between velocities.

    Submitted rows run for a segment: until all are done, until a given velocity, or until a row needs an expert that
    isn't here. The engine changes nothing of the given rows, so a segment can be repeated elsewhere.
    """

    def __init__(
        self,
        answer: Answer,
        here_K: np.ndarray | None = None,
        scheduler: Scheduler | None = None,
        clock: Callable[[], float] = time.monotonic,
        changed: threading.Condition | None = None,
        pace: Pace | None = None,
        cost_K: np.ndarray | None = None,
    ):
        """`here_K` (bool, None: all): experts that `answer` can call. `clock` gives seconds.

        `cost_K`: what a row of each expert costs in rows of the mean one, if they aren't alike; None: all cost one.
        Engines that share one thread share `changed`, which wakes it for work, and `pace`; they aren't started.
        """
        super().__init__(changed)
        self.scheduler = Scheduler() if scheduler is None else scheduler
        self._answer, self._here_K, self._clock, self._cost_K = answer, here_K, clock, cost_K
        self._parts: dict[Job, JobRows] = {}
        self._batch: RowBatch | None = None
        self._calls: list[tuple[ExpertCall, Future[Tensor]]] = []
        self._num_velocities = 0
        self._pace = Pace() if pace is None else pace
        self._ended: float | None = None
        self._num_failures = 0

    @property
    def batch_rows(self) -> int:
        """Rows of the batch."""
        batch = self._batch
        return 0 if batch is None else len(batch.state)

    @property
    def waiting_rows(self) -> int:
        """Rows that wait for a place in it."""
        return max(0, self.scheduler.rows - self.batch_rows)

    @property
    def num_velocities(self) -> int:
        """Velocities that its batch has had."""
        return self._num_velocities

    def require_success(self) -> None:
        """Raise ServeError if nothing succeeds any more."""
        if self._num_failures >= MAX_FAILURES:
            raise ServeError(f"{self._num_failures} velocities in a row have failed")

    def submit(self, rows: Trajectories, seconds: float | None = None, until: int | None = None) -> "Future[Segment]":
        """Run rows of one plan, which have had as many velocities each, for a segment.

        `until`: the segment ends at the latest when its rows have had so many velocities. Rows of a cancelled future
        leave before the next velocity. Raises OverloadedError at once if the work doesn't fit into so many seconds
        (None: TIMEOUT_FACTOR times what it takes alone, MIN_TIMEOUT_S at least). The future raises DeadlineError after
        them, or as soon as it is known, OverloadedError if velocities become too slow for all that was admitted, and
        NotFiniteError or ExpertCountError for networks that answer with nonsense.
        """
        (plan,) = rows.plans
        position, length, future = int(rows.position_B[0]), len(plan.velocities), Future[Segment]()
        until = length if until is None else min(until, length)
        if position >= until:
            future.set_result(Segment(rows, np.full(len(rows), -1)))
            return future
        if seconds is not None and seconds <= 0:
            raise DeadlineError(f"out of time, {until - position} velocities before the end")
        now = self._clock()
        each = rows_each(rows, until, self._cost_K)
        if seconds is None:
            alone = (until - position) * self.scheduler.speed.seconds(each)
            seconds = max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * alone) if alone else MAX_TIMEOUT_S
        job = Job(len(rows), until - position, each, now + seconds)
        with self._changed:
            if self._closed:
                raise ServeError(STOPS)
            self.scheduler.admit(job, now)
            self._parts[job] = JobRows(job, rows, future, now)
            self._changed.notify()
        return future

    def ask(self, call: ExpertCall) -> "Future[Tensor]":
        """Answer a call of an expert that is here, before the next velocity, together with others of it."""
        future = Future[Tensor]()
        with self._changed:
            if self._closed:
                raise ServeError(STOPS)
            self._calls.append((call, future))
            self._changed.notify()
        return future

    def tick(self) -> bool:
        """Answer calls, and run one velocity of the batch; False if there is nothing to do."""
        self._answer_calls()
        self.leave()
        with self._changed:
            now = self._clock()
            parts = [self._parts[job] for job in self.scheduler.batch(now)]
        for part in parts:
            part.began_at = now if part.began_at is None else part.began_at
        with torch.inference_mode():
            try:
                self._batch = batch = self._regrouped(parts)
                self._batch = None if batch is None else self._moved(batch)
            except Exception as error:
                self._isolate(parts, error)
        if not self._parts:
            self._ended = None  # time without work is no part of the next velocity's
        return bool(parts)

    def leave(self) -> None:
        """End parts after their deadline or that can't be in time any more, and forget parts of cancelled calls."""
        with self._changed:
            now = self._clock()
            for job in self.scheduler.late(now):
                self._end(self._parts[job], _out_of_time(job))
            for job in self.scheduler.lost(now):
                alone, left = job.velocities * self.scheduler.speed.seconds(job.rows_each), job.deadline - now
                refused = OverloadedError("velocities have become slower: more than can be made in time", left)
                self._end(self._parts[job], _out_of_time(job) if alone > left else refused)
            for part in [part for part in self._parts.values() if part.future.cancelled()]:
                self._end(part)

    def pause(self) -> None:
        """Note that another engine has the device now: that is no part of a velocity's time."""
        self._ended = None

    def _has_work(self) -> bool:
        return bool(self._parts or self._calls)

    def _end_all(self) -> None:
        for part in list(self._parts.values()):
            self._end(part, ServeError(STOPS))
        for _, future in self._calls:
            future.cancel()

    def _answer_calls(self) -> None:
        with self._changed:
            calls, self._calls = self._calls, []
        live = [(call, future) for call, future in calls if future.set_running_or_notify_cancel()]
        for expert in sorted({call.expert for call, _ in live}):
            own = [(call, future) for call, future in live if call.expert == expert]
            try:
                with torch.inference_mode():
                    parts = [
                        self._answer([joined_call([call for call, _ in own[begin : begin + self.scheduler.max_rows]])])[
                            0
                        ]
                        for begin in range(0, len(own), self.scheduler.max_rows)
                    ]
                answer = torch.cat(parts)
            except Exception as error:
                for _, future in own:
                    future.set_exception(error)
                continue
            for (_, future), rows in zip(own, answer.split([len(call.t_B) for call, _ in own]), strict=True):
                future.set_result(rows)

    def _regrouped(self, parts: list[JobRows]) -> RowBatch | None:
        """The batch of these parts. Parts that make room for others get a state of their own again."""
        batch = self._batch
        if batch is not None:
            for part, span in batch.spans():
                if part not in parts and part.job in self._parts:
                    part.rows = batch.rows(span)
            batch = batch.only(parts)
        new = [part for part in parts if batch is None or part not in batch.parts]
        return RowBatch.of(new, batch) if new else batch

    def _moved(self, batch: RowBatch) -> RowBatch | None:
        """The batch after its next velocity, without the parts that end a segment before or after it."""
        began = self._clock() if self._ended is None else self._ended
        while True:
            state = batch.state if batch.state.turn else turned(batch.state)
            assert state.turn is not None
            if state.turn.chosen is None:
                state = advance(state, self._answer(next_calls(state)))
            batch = RowBatch(batch.parts, state)
            away = self._elsewhere(batch)
            if not away:
                break
            staying = batch.only([part for part in batch.parts if part not in away])
            if staying is None:
                return None
            batch = staying
        self._batch = batch
        after = RowBatch(batch.parts, advance(batch.state, self._answer(next_calls(batch.state))))
        self._pace.keep(after.state.x_BCHW)
        # From the end of one to the end of the next, so that the work between them counts.
        self._ended = self._clock()
        assert batch.state.turn is not None
        assert batch.state.turn.chosen is not None
        paid_B = network_rows_B(batch.state.turn.chosen.layout, self._cost_K)
        self.scheduler.speed.ran(float(paid_B.sum()), self._ended - began)
        ended = {part: after.rows(span) for part, span in after.spans() if part.job.velocities == 1}
        rest = after.only([part for part in after.parts if part not in ended]) if ended else after
        # Nothing fails from here on: all parts have had this velocity, or none.
        self._num_velocities, self._num_failures = self._num_velocities + 1, 0
        for part, span in after.spans():
            part.ran(after.state.position_B[span], paid_B[span])
        for part, rows in ended.items():
            self._end(part, part.segment(rows, np.full(part.job.rows, -1)))
        return rest

    def _elsewhere(self, batch: RowBatch) -> list[JobRows]:
        """End the parts with a row that needs an expert of another engine; they go on there."""
        if self._here_K is None:
            return []
        assert batch.state.turn is not None
        assert batch.state.turn.chosen is not None
        used_BK = batch.state.turn.chosen.layout.used_EK[: len(batch.state)] & ~self._here_K
        needed_B = np.where(used_BK.any(axis=1), used_BK.argmax(axis=1), -1)
        elsewhere = [(part, span) for part, span in batch.spans() if (needed_B[span] >= 0).any()]
        for part, span in elsewhere:
            self._end(part, part.segment(batch.rows(span), needed_B[span]))
        return [part for part, _ in elsewhere]

    def _isolate(self, parts: list[JobRows], error: Exception) -> None:
        """Run each part of a failed batch by itself, so that the fault of one request isn't the others'.

        If an expert doesn't answer, the parts that need it end.
        """
        batch, self._batch = self._batch, None
        self._num_failures += not isinstance(error, DDMError)
        parts = [part for part in parts if part.job in self._parts]
        if isinstance(error, ExpertError) and batch is not None and batch.state.turn and batch.state.turn.chosen:
            layout, count = batch.state.turn.chosen.layout, len(batch.state)
            used_B = layout.used_EK[:count, error.expert].copy()
            # Without its condition a row may need other experts.
            used_B[layout.guided_B] |= layout.used_EK[count:, error.expert]
            for part, span in batch.spans():
                if used_B[span].any():
                    self._end(part, error)
                else:
                    part.rows = batch.rows(span)
            return
        if len(parts) == 1 or isinstance(error, ServeError):
            for part in parts:
                self._end(part, error)
            return
        if batch is not None:
            for part, span in batch.spans():
                part.rows = batch.rows(span)
        for part in parts:
            try:
                alone = self._moved(RowBatch.of([part]))
            except Exception as own:
                self._end(part, own)
            else:
                if alone is not None:
                    part.rows = alone.rows(slice(0, part.job.rows))
        self._batch = None

    def _end(self, part: JobRows, outcome: Segment | Exception | None = None) -> None:
        """Forget a part, and give its outcome to the caller that waits for it."""
        with self._changed:
            if self._parts.pop(part.job, None) is None:
                return  # `close` ends parts, too, if its time is over
            self.scheduler.drop(part.job)
        if outcome is None or not part.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            part.future.set_exception(outcome)
            return
        try:
            require_finite_result(outcome.rows.x_BCHW)  # errors of the GPU itself surface here, too
        except Exception as error:
            part.future.set_exception(error)
        else:
            part.future.set_result(outcome)


def _out_of_time(job: Job) -> DeadlineError:
    return DeadlineError(f"out of time, {job.velocities} velocities before the end")
