"""The meter of a job: each step's loss and gradient norm for ever, and how fast training is just now."""

import time
from array import array
from typing import Any

from ddm_ray.train.saving import Progress

BEAT_SECONDS = 1.0
RECENT = 100


class Meter:
    """Counts from `progress` on; `batch` rows a step."""

    def __init__(self, progress: Progress, batch: int):
        self._before, self._batch = progress, batch
        self._curve = {"loss": array("d"), "grad_norm": array("d")}
        for name, values in progress.curve.items():
            self._curve[name].extend(values)
        self.done = progress.step
        self._began = self._told_at = time.monotonic()
        self._told = self.done

    def step(self, loss: float, grad_norm: float) -> bool:
        """Count a step; whether it is time to tell."""
        self._curve["loss"].append(loss)
        self._curve["grad_norm"].append(grad_norm)
        self.done += 1
        return self.done == self._before.step + 1 or time.monotonic() - self._told_at >= BEAT_SECONDS

    def tell(self) -> dict[str, Any]:
        """What a heartbeat says; speeds are those since it was last asked."""
        now = time.monotonic()
        rate = (self.done - self._told) / max(now - self._told_at, 1e-9)
        recent = self._curve["loss"][-RECENT:]
        self._told_at, self._told = now, self.done
        return {
            "step": self.done,
            "first": self._before.step,
            "loss": sum(recent) / len(recent),
            "grad_norm": self._curve["grad_norm"][-1],
            "steps_per_second": rate,
            "samples_per_second": rate * self._batch,
        }

    def progress(self) -> Progress:
        """A copy of all there is to save."""
        seconds = self._before.seconds + time.monotonic() - self._began
        return Progress(self.done, seconds, {name: values[:] for name, values in self._curve.items()})
