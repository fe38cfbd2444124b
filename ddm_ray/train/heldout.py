"""The held-out loss while training: that of the EMA weights on a few rows that are never trained on.

Always the same rows, noise and times, so that two measurements differ by the weights alone. D draws of noise and time,
B of a micro-batch, G groups of rows, M measurements.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ddm_ray.core.condition import TextIds
from ddm_ray.core.streams import HELDOUT, stream
from ddm_ray.data.loading.heldout_rows import count_heldout, heldout_rows
from ddm_ray.data.loading.stored_rows import StoredRows
from ddm_ray.data.text_encoding import StoredTexts
from ddm_ray.errors import DDMError
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.info import HeldoutInfo
from ddm_ray.run.run import Run
from ddm_ray.spelling import one_line
from ddm_ray.train.batches import on_device
from ddm_ray.train.job import TrainJob
from ddm_ray.train.objectives import Batch, DistillLoss, ExpertLoss, Objective

if TYPE_CHECKING:
    from ddm_ray.train.engine import Engine

GROUPS = 8
"""Groups of held-out rows (G), each with a mean of its own: by how these differ a mean's standard error is known."""
STEPS, DRAWS, LOSSES = "heldout_step", "heldout_draws", "heldout"
"""Names in a training's curve: steps done at each measurement, its draws, its groups' mean losses (M x G, flat)."""
SHARE = 0.06
"""Share of training's FLOPs that measurements cost at first; it halves each time that as many steps more are done."""
FORWARD = 1 / 3
"""Cost of a row that is measured, over that of one trained on."""


@dataclass(frozen=True)
class Schedule:
    """Steps at which a job's held-out loss is measured, on `draws` draws: after the last of `steps`, and on a grid.

    The grid doesn't depend on how many steps there are, so that an extended training is measured as a longer one: every
    `first` steps up to eight times as many, then every two, every four of these and so on, which is at each quarter of
    a doubling.
    """

    first: int
    draws: int
    steps: int

    @classmethod
    def of(cls, job: TrainJob, placement: TrainPlacement) -> Self | None:
        """The schedule of a job with held-out rows; None where none is to be measured."""
        if not placement.heldout_rows or job.guided:
            return None
        draws = max(GROUPS, placement.heldout_rows)
        return cls(math.ceil(FORWARD * draws / (SHARE * job.batch)), draws, job.train.steps)

    def rows_at_once(self, micro_batch: int, world: int) -> int:
        """Rows that each rank of so many takes through the model at once where steps take `micro_batch`."""
        return min(micro_batch, math.ceil(self.draws / world))

    def due(self, done: int) -> bool:
        """True if it is to be measured after so many steps, 1 or more."""
        return done == self.steps or done % self._every(done) == 0

    def kept(self, curve: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """The measurements in a curve that this schedule would have made; not an extended run's after its last step."""
        steps, losses_MG = measurements(curve)
        drawn = zip(steps, curve.get(DRAWS, ()), losses_MG, strict=False)
        rows = [(step, losses_G) for step, draws, losses_G in drawn if draws == self.draws and self.due(int(step))]
        return measured_curve(self.draws, rows)

    def _every(self, done: int) -> int:
        return self.first << max(0, (done // self.first).bit_length() - 3)


def measured_curve(draws: int, rows: Sequence[tuple[float, Sequence[float]]]) -> dict[str, list[float]]:
    """Measurements, a step and losses_G each, as a curve keeps them; without any nothing."""
    if not rows:
        return {}
    losses = [loss for _, losses_G in rows for loss in losses_G]
    return {STEPS: [step for step, _ in rows], DRAWS: [float(draws)] * len(rows), LOSSES: losses}


def measurements(curve: Mapping[str, Sequence[float]]) -> tuple[list[float], list[Sequence[float]]]:
    """Steps (M) and losses_MG of the measurements in a training's curve; empty where there is none."""
    steps, flat = list(curve.get(STEPS, ())), curve.get(LOSSES, ())
    if len(flat) != GROUPS * len(steps):
        return [], []
    return steps, [flat[GROUPS * number : GROUPS * (number + 1)] for number in range(len(steps))]


def last_measured(curve: Mapping[str, Sequence[float]]) -> HeldoutInfo | None:
    """The newest measurement in a training's curve; None where there is none, or one that isn't finite."""
    steps, losses_MG = measurements(curve)
    if not steps or not all(map(math.isfinite, losses_MG[-1])):
        return None
    mean = math.fsum(losses_MG[-1]) / GROUPS
    error = math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses_MG[-1]) / (GROUPS - 1) / GROUPS)
    return HeldoutInfo(step=int(steps[-1]), loss=mean, error=error)


class HeldoutLoss:
    """One rank's part in measuring a job's held-out loss; all ranks measure together, each some draws."""

    def __init__(
        self, job: TrainJob, schedule: Schedule, rows: StoredRows, micro_batch: int, texts: StoredTexts | None = None
    ):
        self._job, self._rows, self._draws, self._texts = job, rows, schedule.draws, texts
        self.schedule = schedule
        rank, world = dist.get_rank(), dist.get_world_size()
        share = math.ceil(schedule.draws / world)
        first = min(rank * share, schedule.draws)
        self._own = range(first, min(first + share, schedule.draws))
        # Ranks take equally many micro-batches of equal size: each is a collective under ZeRO 3, and compiled once.
        self._micro_batch = schedule.rows_at_once(micro_batch, world)
        self._parts = math.ceil(share / self._micro_batch)
        numbers = stream(job.train.seed, HELDOUT, *job.key)
        stratum_D = numbers.permutation(schedule.draws)
        uniform_D = (stratum_D + numbers.random(schedule.draws)) / schedule.draws
        self._t_D = job.times.times(uniform_D.astype(np.float32).clip(max=np.float32(1 - 2**-24)), job.flow.path)

    @classmethod
    def of(
        cls, run: Run, job: TrainJob, placement: TrainPlacement, micro_batch: int, texts: StoredTexts | None
    ) -> tuple[Self | None, str]:
        """The held-out loss of a job, with its rows in memory; None where none is measured, and why if that is unasked.

        All ranks must ask. Rows that are too few, or can't be read, end nothing.
        """
        schedule = Schedule.of(job, placement)
        if schedule is None:
            return None, ""
        rows, problem = None, ""
        try:
            if (count := count_heldout(run, job.shards)) < GROUPS:
                problem = f"its shards have {count} held-out rows, and fewer than {GROUPS} tell nothing"
            else:
                rows = heldout_rows(run, job.shards, schedule.draws, placement.cache)
                if isinstance(ids := rows.condition(), TextIds) and texts is not None:
                    texts.require_known(ids)
        except DDMError as error:  # of rows that no step needs
            problem = one_line(error)
        problems = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if rows is None or any(problems):
            return None, next(filter(None, problems))
        return cls(job, schedule, rows, micro_batch, texts), ""

    @property
    def steps(self) -> float:
        """Training steps that a measurement costs about as much as."""
        return FORWARD * self._draws / self._job.batch

    @torch.no_grad()
    def measure(self, engine: "Engine") -> list[float]:
        """Mean losses of the G groups of rows, by the EMA weights; what is trained on stays as it is, to the bit.

        Every rank must call it.
        """
        loss_D = torch.zeros(self._draws, dtype=torch.float64, device=engine.device)
        objective = measured_objective(self._job)
        with engine.computing_with_ema() as model:
            for own, batch in self._batches():
                loss_B = objective(model, on_device(batch, engine.device, self._texts)).double()
                loss_D[own.start : own.stop] = loss_B[: len(own)]
        if dist.get_world_size() > 1:
            dist.all_reduce(loss_D)
        group_D = torch.arange(self._draws) % self._rows.num_rows % GROUPS
        sum_G = torch.zeros(GROUPS, dtype=torch.float64).index_add(0, group_D, loss_D.cpu())
        return (sum_G / torch.bincount(group_D, minlength=GROUPS)).tolist()

    def _batches(self) -> Iterator[tuple[range, Batch]]:
        """Draws that this rank measures, as micro-batches of equal size: the last ones are filled up with others."""
        for part in range(self._parts):
            own = self._own[part * self._micro_batch : (part + 1) * self._micro_batch]
            filled = [*own, *[0] * (self._micro_batch - len(own))]
            yield own, self._batch(np.array(filled))

    def _batch(self, draw_B: np.ndarray) -> Batch:
        rows = self._rows.part(draw_B % self._rows.num_rows)
        return Batch(
            data_BCHW=torch.from_numpy(rows.modelled()),
            noise_BCHW=torch.stack([self._noise(draw) for draw in draw_B.tolist()]),
            t_B=self._t_D[torch.from_numpy(draw_B)],
            condition=rows.condition(),
            cluster_B=torch.from_numpy(rows.cluster_N),
        )

    def _noise(self, draw: int) -> Tensor:
        # Each draw's by itself: of large images not all fit in memory at once.
        numbers = stream(self._job.train.seed, HELDOUT, *self._job.key, draw)
        return torch.from_numpy(numbers.standard_normal(self._job.image_shape, np.float32))


def measured_objective(job: TrainJob) -> Objective:
    """The loss that is measured: the job's own, of a student that of the data, which has no teacher's answers."""
    return ExpertLoss(job.flow) if isinstance(job.objective, DistillLoss) else job.objective
