"""What happened to a run's artifacts between one survey and the next. Pure: surveys and a clock's readings in."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ddm_ray.storage.status import Status, describe, duration

Kind = Literal["stalled", "failed", "damaged", "finished", "resumed"]


@dataclass(frozen=True)
class Event:
    """A change of one artifact, as a webhook is told of it; `steps` None where they aren't known.

    `final`: a failure that trying again won't mend, or a launch that gave up; after any other its launch, if that still
    runs, begins the next attempt.
    """

    run: str
    artifact: str
    event: Kind
    attempt: int
    step: int
    steps: int | None
    text: str
    final: bool = False

    @property
    def alarm(self) -> bool:
        """Whether someone should look."""
        return self.event in ("stalled", "failed", "damaged")

    def body(self) -> dict[str, Any]:
        """Its fields, for JSON."""
        return asdict(self)


@dataclass
class _Memory:
    mark: tuple[int, int | None] | None = None  # the newest attempt and its heartbeat's counter
    since: float = 0.0  # when that mark was first seen
    alarm: tuple[Kind, int] | None = None  # what was last told, and of which attempt, until it beats again
    finished: bool = False


@dataclass
class Events:
    """Turns successive surveys of a run into events.

    A job has stalled when its newest attempt's counter hasn't changed for `stalled_after` seconds of the caller's own
    clock, and for three of its steps where these take longer. An attempt's failure is told once, its stall once until
    it beats again. What is finished when watching begins is no news; failures and stalls that stand then are told.
    """

    run: str
    stalled_after: float
    _known: dict[str, _Memory] = field(default_factory=dict)

    def seen(self, found: Iterable[Status], now: float) -> list[Event]:
        """The events that this survey, made at `now` (seconds of any clock that only grows), brings."""
        told = [self._of(status, now) for status in found]
        return [event for event in told if event]

    def _of(self, found: Status, now: float) -> Event | None:
        begins = found.artifact not in self._known
        memory = self._known.setdefault(found.artifact, _Memory())
        if found.state == "finished":
            news = not begins and not memory.finished
            memory.finished, memory.alarm = True, None
            return self._event(found, "finished") if news else None
        memory.finished = False
        if found.state == "damaged":
            told, memory.alarm = memory.alarm, ("damaged", 0)
            return None if told == memory.alarm else self._event(found, "damaged")
        job = found.progress
        if job is None:
            return None
        if memory.mark != (job.attempt, job.beat):
            memory.mark, memory.since = (job.attempt, job.beat), now
            if found.state == "begun" and memory.alarm and job.beat is not None:
                memory.alarm = None
                return self._event(found, "resumed")
        kind: Kind = "failed" if found.state == "failed" else "stalled"
        due = kind == "failed" or now - memory.since >= job.patience(self.stalled_after)
        if not due or memory.alarm == (kind, job.attempt):
            return None
        memory.alarm = (kind, job.attempt)
        return self._event(found, kind)

    def _event(self, found: Status, kind: Kind) -> Event:
        job, info = found.progress, found.info
        if job:
            attempt, step, steps = job.attempt, job.step, job.steps
        else:
            attempt, step = info.get("attempts", 0), info.get("step", 0)
            steps = step
        text = f"{self.run}: {found.artifact} {kind}: {describe(found).removeprefix('failed: ')}"
        if kind == "stalled":
            waited = duration(job.patience(self.stalled_after) if job else 0.0)
            text = f"{self.run}: {found.artifact} stalled, no sign for {waited}: {describe(found)}"
        final = bool(job and job.failure and job.failure["final"])
        return Event(self.run, found.artifact, kind, attempt, step, steps, text, final)
