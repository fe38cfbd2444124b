"""Reporter of a training job: its heartbeat, its curves for TensorBoard, and the loss of each step."""

from collections.abc import Mapping
from typing import Any, Self

from ddm_ray.errors import TrainingError
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.train.heartbeat import TRAINING, Heartbeat
from ddm_ray.train.meter import Meter
from ddm_ray.train.state_writer import StateWriter
from ddm_ray.train.step_sync import Agreed
from ddm_ray.train.telemetry import Telemetry

CURVES = ("loss", "grad_norm", "learning_rate", "samples_per_second", "mfu")


class Reporter:
    """Reports how an attempt goes; a context manager. With no attempt, as on other ranks than 0, it counts steps alone.

    `facts` are in every heartbeat.
    """

    def __init__(self, attempt: Attempt | None, facts: Mapping[str, Any], states: StateWriter):
        self._states, self._reported_unsaved = states, ""
        self._meter: Meter | None = None
        self._telemetry = Telemetry(attempt.store, attempt.prefix) if attempt else None
        self._heartbeat = Heartbeat(attempt, dict(facts)) if attempt else None
        self.say("starting")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._heartbeat:
            self._heartbeat.close()
        self.end_curves()

    @property
    def meter(self) -> Meter:
        """The meter, once `begin` has set it."""
        assert self._meter is not None
        return self._meter

    def begin(self, meter: Meter) -> None:
        """Report by this meter from here on."""
        self._meter = meter

    def after(self, done: int, agreed: Agreed) -> None:
        """Count the steps with new results, and report now and then. TrainingError for a result that isn't finite."""
        for result in agreed.results:
            if not result.finite:
                raise TrainingError(
                    f"loss {result.loss} with gradient norm {result.norm} at step {result.step}; begin a run with a"
                    " lower learning_rate"
                )
        due = [self.meter.count(result.loss, result.norm) for result in agreed.results]
        if any(due) or self.has_unreported_failure:
            self.report()

    def say(self, phase: str) -> None:
        """Say in which phase the attempt is; in all phases but training the heartbeat beats by itself."""
        if self._heartbeat:
            self._beat(phase, self._meter.fields() if self._meter else {})

    def report(self) -> None:
        """Report the progress to the heartbeat and the curves."""
        if self._heartbeat and self._telemetry:
            fields = self.meter.fields()
            self._beat(TRAINING, fields)
            self._telemetry.record(fields["step"], {name: fields[name] for name in CURVES})
            if fields.get("heldout_step") == fields["step"]:
                self._telemetry.record(fields["step"], {"heldout_loss": fields["heldout_loss"]})

    def upload_curves(self) -> None:
        """Upload the curves to an object store, without waiting for it."""
        if self._telemetry:
            self._telemetry.upload()

    def end_curves(self) -> None:
        """Write what is left of the curves, and end them."""
        if self._telemetry:
            self._telemetry.close()

    @property
    def has_unreported_failure(self) -> bool:
        """True if the heartbeat doesn't say yet that states can't be saved, or can again."""
        return self._heartbeat is not None and self._states.unsaved != self._reported_unsaved

    def _beat(self, phase: str, fields: Mapping[str, Any]) -> None:
        assert self._heartbeat is not None
        self._reported_unsaved = self._states.unsaved
        self._heartbeat.tell(phase, unsaved=self._reported_unsaved, **fields)
