"""Saver of a training: when a state is due by steps, by the clock or at a milestone, and before the training ends."""

import math
import time
from typing import TYPE_CHECKING

from ddm_ray.placement import TrainPlacement
from ddm_ray.train.pictures import Pictures
from ddm_ray.train.publish import Milestones
from ddm_ray.train.reporter import Reporter
from ddm_ray.train.state import TrainProgress
from ddm_ray.train.state_writer import StateWriter
from ddm_ray.train.step_sync import Agreed, Flags

if TYPE_CHECKING:
    from ddm_ray.train.engine import Engine

YOUNG_SECONDS = 5.0
"""Time after which an attempt's first state is due."""


class SaveClock:
    """Says when a state is due by the clock: `minutes` after the one before, sooner in an attempt's first minutes.

    With `young` it is due then once half of the time up to the last one, and YOUNG_SECONDS, have passed. So a kill soon
    after the start costs a third of the time trained, and a machine that lives for a minute makes progress. An infinite
    number of minutes is none. Times are readings of one clock in seconds.
    """

    def __init__(self, minutes: float, now: float, young: bool = True):
        self._youngest = YOUNG_SECONDS if young else math.inf
        self._most, self._began, self._saved = 60 * minutes, now, now

    def due(self, now: float) -> bool:
        """True if a state is to be saved."""
        pause = min(self._most, max(self._youngest, (self._saved - self._began) / 2))
        return math.isfinite(self._most) and now - self._saved >= pause

    def saved(self, now: float) -> None:
        """Note that one is being saved."""
        self._saved = now


class Saver:
    """Saves states of a job of so many `steps`: beside training when one is due, and at once before it ends."""

    def __init__(
        self,
        steps: int,
        placement: TrainPlacement,
        engine: "Engine",
        writer: StateWriter,
        milestones: Milestones,
        pictures: Pictures,
        reporter: Reporter,
    ):
        self._steps, self._engine, self._writer, self._milestones = steps, engine, writer, milestones
        self._pictures, self._reporter = pictures, reporter
        self._checkpoint_steps, self._milestone_steps = placement.checkpoint_steps, placement.milestone_steps
        self._clock = SaveClock(
            placement.minutes_between_states, time.monotonic(), young=placement.checkpoint_steps is None
        )
        self._saved_step = reporter.meter.done

    def flags(self) -> Flags:
        """This rank's facts for the step's exchange."""
        writer = self._writer
        return Flags(
            writing=writer.writing,
            saving=writer.busy,
            refused=writer.refused,
            unsavable=writer.unsavable,
            checkpoint_due=self._clock.due(time.monotonic()),
        )

    def acts_after(self, done: int, agreed: Agreed) -> bool:
        """True if a state follows this step, so that the step's own result has to be known."""
        return agreed.any_rank.leaving or done == self._steps or self._saves_beside(done, agreed)

    def after(self, done: int, agreed: Agreed) -> None:
        """Save a state if one is due, or at once if a rank has to leave."""
        if agreed.any_rank.leaving:
            self.save_now()
        elif self._saves_beside(done, agreed):
            if agreed.any_rank.saving:
                self._reporter.say("saving")  # the heartbeat goes on while the state before this one is written
            self._writer.save(self._engine, self._reporter.meter.progress(), lambda: self._committed(done))
            self._clock.saved(time.monotonic())
            self._saved_step = done

    def save_now(self) -> TrainProgress:
        """Save a state and wait until it is committed; the progress that it holds."""
        self._pictures.close()  # the thread that paints is the one that saves
        progress = self._reporter.meter.progress()
        self._writer.save_now(self._engine, progress, self._reporter.upload_curves)
        return progress

    def _saves_beside(self, done: int, agreed: Agreed) -> bool:
        # Not at the last step: that state is saved at once. A milestone waits for the state before it; others don't.
        if done == self._steps:
            return False
        due = agreed.any_rank.checkpoint_due or self._passed_multiple(done)
        return self._is_milestone(done) or (due and not agreed.any_rank.saving)

    def _passed_multiple(self, done: int) -> bool:
        """True if a multiple of `checkpoint_steps` was passed since the last state."""
        every = self._checkpoint_steps
        return every is not None and done // every > self._saved_step // every

    def _is_milestone(self, done: int) -> bool:
        return self._milestone_steps is not None and done % self._milestone_steps == 0

    def _committed(self, done: int) -> None:
        """Called on rank 0, in the writer's thread, once the state of this step is committed."""
        self._reporter.upload_curves()
        if self._is_milestone(done):
            self._milestones.publish(done)
        else:
            self._pictures.after_state(done)
