"""Events of a run's artifacts between two surveys. Pure: surveys in, events out."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ddm_ray.jobs.describe import describe
from ddm_ray.jobs.status import Status
from ddm_ray.remedies import Fix
from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import TrainedInfo
from ddm_ray.spelling import duration

Kind = Literal["stalled", "failed", "damaged", "finished", "resumed", "unsaved"]


@dataclass(frozen=True)
class Event:
    """A change of one artifact, as it is posted to a webhook. `steps` is None if unknown.

    `final`: a failure that a retry won't mend, or a launch that gave up. After other failures a running launch begins
    the next attempt.
    """

    run: str
    artifact: Artifact
    event: Kind
    attempt: int
    step: int
    steps: int | None
    text: str
    final: bool = False

    @property
    def alarm(self) -> bool:
        """True if the event needs attention."""
        return self.event in ("stalled", "failed", "damaged", "unsaved")

    def body(self) -> dict[str, Any]:
        """Fields of the event, for JSON."""
        return asdict(self)


@dataclass
class _Memory:
    beat: tuple[int, int | None] | None = None  # the newest attempt and its heartbeat's counter
    alarm: tuple[Kind, int] | None = None  # the last alarm and its attempt, until that one beats again
    finished: bool = False
    unsaved: bool = False


@dataclass
class Events:
    """Turns successive surveys of a run by one observer into events.

    A job has stalled if it is silent for `stalled_after` seconds and for the time of three steps; a launch without an
    attempt, for at least START_SECONDS. An attempt's failure gives one event. A stall gives one until the attempt beats
    again, and unsaved states one until a state is saved. Artifacts that are finished at the first survey give no event,
    but failures and stalls at that time do.
    """

    run: str
    stalled_after: float
    phrase: Callable[[Fix], str] = str
    _known: dict[str, _Memory] = field(default_factory=dict)

    def seen(self, statuses: Iterable[Status]) -> list[Event]:
        """The events of this survey. Its statuses must come from an observer."""
        events = [self._of(status) for status in statuses]
        return [event for event in events if event]

    def _of(self, status: Status) -> Event | None:
        begins = status.artifact not in self._known
        memory = self._known.setdefault(status.artifact, _Memory())
        if status.state == "finished":
            news = not begins and not memory.finished
            memory.finished, memory.alarm = True, None
            return self._event(status, "finished") if news else None
        memory.finished = False
        if status.state == "damaged":
            before, memory.alarm = memory.alarm, ("damaged", 0)
            return None if before == memory.alarm else self._event(status, "damaged")
        job = status.job
        if job is None or status.state == "stopped":
            return None  # a stop request isn't an event
        if memory.beat != (job.attempt, job.beat):
            memory.beat = (job.attempt, job.beat)
            if status.state == "begun" and memory.alarm and job.beat is not None:
                memory.alarm = None
                return self._event(status, "resumed")
        kind: Kind = "failed" if status.state == "failed" else "stalled"
        due = kind == "failed" or (status.silent_seconds or 0.0) >= job.lease_seconds(self.stalled_after)
        if not due or memory.alarm == (kind, job.attempt):
            news, memory.unsaved = bool(job.unsaved) and not memory.unsaved, bool(job.unsaved)
            return self._event(status, "unsaved") if news else None
        memory.alarm = (kind, job.attempt)
        return self._event(status, kind)

    def _event(self, status: Status, kind: Kind) -> Event:
        job, info = status.job, status.info
        if job:
            attempt, step, steps = job.attempt, job.step, job.steps
        elif isinstance(info, TrainedInfo):
            attempt, step, steps = info.attempts, info.step, info.step
        else:
            attempt, step, steps = 0, 0, 0
        text = f"{self.run}: {status.artifact} {kind}: {describe(status, self.phrase).removeprefix('failed: ')}"
        if kind == "stalled":
            waited = duration(job.lease_seconds(self.stalled_after) if job else 0.0)
            text = f"{self.run}: {status.artifact} stalled, no sign for {waited}: {describe(status, self.phrase)}"
        final = bool(job and job.failure and job.failure["final"])
        return Event(self.run, status.artifact, kind, attempt, step, steps, text, final)
