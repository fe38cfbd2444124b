"""The meter of a job: the loss and gradient norm of all its steps, and how fast training is now."""

import time
from array import array
from typing import Any

import torch

from ddm_ray.train.hardware import mfu, peak_flops
from ddm_ray.train.heartbeat import beat_seconds
from ddm_ray.train.heldout import Schedule, last_measured, measured_curve
from ddm_ray.train.job import TrainJob
from ddm_ray.train.state import TrainProgress

RECENT = 100


class Meter:
    """Counts the steps of a job from the step at which it continues."""

    def __init__(
        self,
        job: TrainJob,
        before: TrainProgress,
        device: torch.device,
        world_size: int,
        heldout: Schedule | None = None,
        unmeasured: str = "",
    ):
        """`heldout`: the schedule of the held-out loss; measurements of another schedule aren't kept.

        `unmeasured` says why this attempt measures none. `uncompiled` may be set to why its steps aren't compiled.
        """
        self._job, self._before, self._world = job, before, world_size
        self.unmeasured, self.uncompiled = unmeasured, ""
        measured = heldout.kept(before.curve) if heldout else {}
        self._curve = {name: array("d", before.curve.get(name, ())) for name in ("loss", "grad_norm")}
        self._curve |= {name: array("d", values) for name, values in measured.items()}
        self.done = before.step
        self._peak = peak_flops(device, job.train.precision)
        self._began = self._reported_at = time.monotonic()
        self._reported, self._rate, self._flops_per_row = self.done, 0.0, 0.0

    def count(self, loss: float, grad_norm: float) -> bool:
        """Count a step; True if it is time to report."""
        self._curve["loss"].append(loss)
        self._curve["grad_norm"].append(grad_norm)
        self.done += 1
        now = time.monotonic()
        due = now - self._reported_at >= beat_seconds(now - self._began)
        return due or self.done == self._before.step + 1

    def add_heldout(self, draws: int, losses_G: list[float]) -> None:
        """Note the held-out losses of the weights after the steps that are done, by groups of rows."""
        for name, values in measured_curve(draws, [(float(self.done), losses_G)]).items():
            self._curve.setdefault(name, array("d")).extend(values)

    def fields(self) -> dict[str, Any]:
        """Fields of a heartbeat; speeds cover the time since the last call after a step."""
        now = time.monotonic()
        if self.done > self._reported:
            steps = self.done - self._reported
            self._rate = steps / max(now - self._reported_at, 1e-9)
            flops = self._job.training_flops(self.done) - self._job.training_flops(self._reported)
            self._flops_per_row = flops / (steps * self._job.batch)
            self._reported_at, self._reported = now, self.done
        why = {"unmeasured": self.unmeasured, "uncompiled": self.uncompiled}
        progress = {"step": self.done, "first": self._before.step, **why}
        if not self._curve["loss"]:
            return progress
        recent = self._curve["loss"][-RECENT:]
        return progress | {
            "loss": sum(recent) / len(recent),
            "grad_norm": self._curve["grad_norm"][-1],
            **self._heldout(),
            "learning_rate": self._job.learning_rate(self.done - 1),
            "steps_per_second": self._rate,
            "samples_per_second": self._rate * self._job.batch,
            "flops_per_second": self._flops_per_row * self._rate * self._job.batch,
            "mfu": mfu(self._flops_per_row, self._rate * self._job.batch, self._world, self._peak),
        }

    def _heldout(self) -> dict[str, Any]:
        last = last_measured(self._curve)
        return {f"heldout_{name}": value for name, value in last} if last else {}

    def progress(self) -> TrainProgress:
        """A copy of the progress so far, for a state."""
        seconds = self._before.seconds + time.monotonic() - self._began
        return TrainProgress(self.done, seconds, {name: values[:] for name, values in self._curve.items()})
