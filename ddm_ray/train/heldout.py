"""The held-out loss while training: the loss of the EMA weights on a few rows that are never trained on.

Rows, noise and times are always the same, so that two measurements differ by the weights alone. D draws of noise and
time, B of a micro-batch, G groups of rows, M measurements.
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
from ddm_ray.train.ranks import gather_objects
from ddm_ray.train.step_sync import Agreed
from ddm_ray.train.watchdog import Watchdog

if TYPE_CHECKING:
    from ddm_ray.train.engine import Engine
    from ddm_ray.train.reporter import Reporter

GROUPS = 8
"""Groups of held-out rows (G), each with a mean of its own: their spread gives the standard error of the whole mean."""
STEPS, DRAWS, LOSSES = "heldout_step", "heldout_draws", "heldout"
"""Names in a training's curve: steps done at each measurement, its draws, its groups' mean losses (M x G, flat)."""
SHARE = 0.06
"""Share of training's FLOPs that measurements cost at first; it halves each time that the number of steps doubles."""
FORWARD = 1 / 3
"""Cost of measuring a row, as a share of the cost of training on it."""


@dataclass(frozen=True)
class Schedule:
    """Steps at which a job's held-out loss is measured, with `draws` draws: after the last of `steps`, and on a grid.

    The grid is every `first` steps up to eight times as many, then every two times `first`, every four times and so on:
    four measurements to each doubling. It doesn't depend on the number of steps, so that an extended training is
    measured at the same steps as one that was longer from the start.
    """

    first: int
    draws: int
    steps: int

    @classmethod
    def of(cls, job: TrainJob, placement: TrainPlacement) -> Self | None:
        """The schedule of a job with held-out rows; None if the placement or the job measures none."""
        if not placement.heldout_rows or job.guided:
            return None
        draws = max(GROUPS, placement.heldout_rows)
        return cls(math.ceil(FORWARD * draws / (SHARE * job.batch)), draws, job.train.steps)

    def due(self, done: int) -> bool:
        """True if it is time to measure after so many steps, 1 or more."""
        return done == self.steps or done % self._every(done) == 0

    def kept(self, curve: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """The measurements in a curve that this schedule would have made too: an extended run's last step isn't one."""
        steps, losses_MG = measurements(curve)
        drawn = zip(steps, curve.get(DRAWS, ()), losses_MG, strict=False)
        rows = [(step, losses_G) for step, draws, losses_G in drawn if draws == self.draws and self.due(int(step))]
        return measured_curve(self.draws, rows)

    def _every(self, done: int) -> int:
        return self.first << max(0, (done // self.first).bit_length() - 3)


def measured_curve(draws: int, rows: Sequence[tuple[float, Sequence[float]]]) -> dict[str, list[float]]:
    """Measurements, a step and losses_G each, in the form of a curve; empty without measurements."""
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
        self._micro_batch = min(micro_batch, share)
        self._parts = math.ceil(share / self._micro_batch)
        numbers = stream(job.train.seed, HELDOUT, *job.key)
        stratum_D = numbers.permutation(schedule.draws)
        uniform_D = (stratum_D + numbers.random(schedule.draws)) / schedule.draws
        self._t_D = job.times.times(uniform_D.astype(np.float32).clip(max=np.float32(1 - 2**-24)), job.flow.path)

    @classmethod
    def of(
        cls, run: Run, job: TrainJob, placement: TrainPlacement, micro_batch: int, texts: StoredTexts | None
    ) -> tuple[Self | None, str]:
        """The held-out loss of a job, with its rows in memory, or None; and why it isn't measured, if it should be.

        All ranks must call it. Training goes on if rows are too few, or can't be read.
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
        except DDMError as error:  # no step needs these rows
            problem = one_line(error)
        problems = gather_objects(problem)
        if rows is None or any(problems):
            return None, next(filter(None, problems))
        return cls(job, schedule, rows, micro_batch, texts), ""

    @property
    def steps(self) -> float:
        """Number of training steps that cost about as much as a measurement."""
        return FORWARD * self._draws / self._job.batch

    @torch.no_grad()
    def measure(self, engine: "Engine") -> list[float]:
        """Mean losses of the G groups of rows, by the EMA weights; the training state stays as it is, to the bit.

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
        # One stream a draw: the noise of all draws, for large images, may not fit in memory at once.
        numbers = stream(self._job.train.seed, HELDOUT, *self._job.key, draw)
        return torch.from_numpy(numbers.standard_normal(self._job.image_shape, np.float32))


class Measurer:
    """Measures a job's held-out loss at the steps of its schedule; with None never."""

    def __init__(self, heldout: HeldoutLoss | None, engine: "Engine", reporter: "Reporter", watchdog: Watchdog):
        self._heldout, self._engine, self._reporter, self._watchdog = heldout, engine, reporter, watchdog

    def acts_after(self, done: int) -> bool:
        """True if a measurement follows this step, so that the step's own result has to be known."""
        return self._heldout is not None and self._heldout.schedule.due(done)

    def after(self, done: int, agreed: Agreed) -> None:
        """Measure if it is time; also before a rank leaves, or else the curve would lack that point."""
        if self._heldout is None or not self._heldout.schedule.due(done):
            return
        self._reporter.say("measuring")
        with self._watchdog.measurement(self._heldout.steps):
            losses_G = self._heldout.measure(self._engine)
        self._reporter.meter.add_heldout(self._heldout.schedule.draws, losses_G)
        self._reporter.report()


def measured_objective(job: TrainJob) -> Objective:
    """The job's own loss; for a student the loss of the data, which needs no teacher."""
    return ExpertLoss(job.flow) if isinstance(job.objective, DistillLoss) else job.objective
