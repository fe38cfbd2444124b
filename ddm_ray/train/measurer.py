"""Measurer of a training job: the held-out loss at the steps of its schedule."""

from typing import TYPE_CHECKING

from ddm_ray.train.heldout import HeldoutLoss
from ddm_ray.train.reporter import Reporter
from ddm_ray.train.step_guard import StepGuard
from ddm_ray.train.step_sync import Agreed

if TYPE_CHECKING:
    from ddm_ray.train.engine import Engine


class Measurer:
    """Measures a job's held-out loss; with None never."""

    def __init__(self, heldout: HeldoutLoss | None, engine: "Engine", reporter: Reporter, guard: StepGuard):
        self._heldout, self._engine, self._reporter, self._guard = heldout, engine, reporter, guard

    def acts_after(self, done: int) -> bool:
        """True if a measurement follows this step, so that the step's own result has to be known."""
        return self._heldout is not None and self._heldout.schedule.due(done)

    def after(self, done: int, agreed: Agreed) -> None:
        """Measure if it is time; also before a rank leaves, or else the curve would lack that point."""
        if self._heldout is None or not self._heldout.schedule.due(done):
            return
        self._reporter.say("measuring")
        with self._guard.measurement(self._heldout.steps):
            losses_G = self._heldout.measure(self._engine)
        self._reporter.meter.add_heldout(self._heldout.schedule.draws, losses_G)
        self._reporter.report()
