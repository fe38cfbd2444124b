"""Rows of many requests as one state: parts that join and leave. Shapes: B rows, K experts."""

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddm_ray.core.condition import join
from ddm_ray.sampling.request import ExpertCall
from ddm_ray.sampling.state import Layout, Trajectories
from ddm_ray.serve.engine.runner import Segment
from ddm_ray.serve.engine.scheduler import Job


@dataclass(eq=False)
class JobRows:
    """Rows of one request, which run together. `rows`: their state when they were last in no batch.

    `submitted_at` and `began_at` (None: not yet) are times of the engine's clock.
    """

    job: Job
    rows: Trajectories
    future: "Future[Segment]"
    submitted_at: float
    began_at: float | None = None

    def segment(self, rows: Trajectories, needed_B: np.ndarray) -> Segment:
        """The segment that ends with these rows."""
        assert self.began_at is not None
        return Segment(rows, needed_B, self.began_at - self.submitted_at)

    def ran(self, position_B: np.ndarray, network_rows_B: np.ndarray) -> None:
        """Note a velocity of these rows; the estimate for those to come assumes as many experts."""
        self.job.velocities -= 1
        (plan,) = self.rows.plans
        if self.job.velocities:
            position, most_N = int(position_B[0]), plan.most_rows_N
            self.job.rows_each = float(network_rows_B.sum() * most_N[position:].mean() / most_N[position - 1])


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Parts with their rows as one state, in this order."""

    parts: list[JobRows]
    state: Trajectories

    @classmethod
    def of(cls, parts: Sequence[JobRows], batch: "RowBatch | None" = None) -> "RowBatch":
        """A batch with the parts of another and these, which are in no batch yet."""
        before, states = ([], []) if batch is None else (batch.parts, [batch.state])
        states += [part.rows for part in parts]
        return cls([*before, *parts], states[0] if len(states) == 1 else Trajectories.joined(states))

    def spans(self) -> Iterator[tuple[JobRows, slice]]:
        """Each part, and the slice of its rows."""
        start = 0
        for part in self.parts:
            yield part, slice(start, start + part.job.rows)
            start += part.job.rows

    def rows(self, span: slice) -> Trajectories:
        return self.state.rows(np.arange(span.start, span.stop))

    def only(self, staying: Collection[JobRows]) -> "RowBatch | None":
        """The batch with only these of its parts; None if it has none of them."""
        if all(part in staying for part in self.parts):
            return self
        stay = [(part, np.arange(span.start, span.stop)) for part, span in self.spans() if part in staying]
        if not stay:
            return None
        return RowBatch([part for part, _ in stay], self.state.rows(np.concatenate([rows for _, rows in stay])))


def rows_each(rows: Trajectories, until: int, cost_K: np.ndarray | None) -> float:
    """Rows of networks that a velocity of these rows of one plan takes at most, from now to velocity `until`.

    `cost_K`: see `BatchEngine`. Of rows that hold no expert yet any may be drawn.
    """
    (plan,) = rows.plans
    most = len(rows) * float(plan.most_rows_N[int(rows.position_B[0]) : until].mean())
    if cost_K is None:
        return most
    weights_BK = rows.weights_BK.numpy()
    held_BK = np.where(weights_BK.any(axis=1, keepdims=True), weights_BK > 0, True)
    return most * float(((held_BK @ cost_K) / held_BK.sum(axis=1)).mean())


def network_rows_B(layout: Layout, cost_K: np.ndarray | None) -> np.ndarray:
    """Rows of networks that each row of a velocity takes, by what its experts cost."""
    if cost_K is None:
        return layout.experts_B
    cost_E = layout.used_EK @ cost_K
    cost_B = cost_E[: len(layout.guided_B)].copy()
    cost_B[layout.guided_B] += cost_E[len(cost_B) :]
    return cost_B


class Pace:
    """Keeps the host at most one velocity ahead of a GPU: else it can't measure a velocity, and rows can't leave."""

    def __init__(self) -> None:
        self._before: torch.cuda.Event | None = None

    def keep(self, x_BCHW: Tensor) -> None:
        """Wait for the velocity before this one to end. This one's work has just been given to the GPU."""
        if not x_BCHW.is_cuda:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(x_BCHW.device))
        before, self._before = self._before, event
        if before is not None:
            before.synchronize()


def joined_call(calls: Sequence[ExpertCall]) -> ExpertCall:
    """One call of an expert for the rows of these."""
    if len(calls) == 1:
        return calls[0]
    x_BCHW, t_B = torch.cat([call.x_BCHW for call in calls]), torch.cat([call.t_B for call in calls])
    return ExpertCall(calls[0].expert, x_BCHW, t_B, join([call.condition for call in calls]))
