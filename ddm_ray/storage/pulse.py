"""Pulses: the judge of whether a job lives. A counter that changes is a sign of life; no two machines' clocks are read.

Pure: an observer brings what it read of storage, and readings of its own clock.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pulse:
    """A job's newest attempt and its `JobStatus.sign`, None before the first beat, as an observer saw them.

    `since`: a reading, in seconds, of the observer's own clock when it first saw these. `moved`: the observer has seen
    this attempt's sign change.
    """

    attempt: int
    sign: int | str | None
    since: float
    moved: bool = False


class Pulses:
    """The pulses of many jobs, as one observer sees them."""

    def __init__(self) -> None:
        self._pulses: dict[str, Pulse] = {}

    def take(self, job: str, attempt: int, sign: int | str | None, now: float) -> float:
        """Seconds since this observer first saw the job's newest attempt and its sign as they are: 0 after a change.

        Whoever has just begun to look knows of no silence.
        """
        pulse = self._pulses.get(job)
        if pulse is None or (pulse.attempt, pulse.sign) != (attempt, sign):
            moved = pulse is not None and pulse.attempt == attempt
            pulse = self._pulses[job] = Pulse(attempt, sign, now, moved)
        return now - pulse.since

    def moved(self, job: str) -> bool:
        """True if the sign of the attempt that was taken last has changed in this observer's sight.

        The first one seen is no change: whoever wrote it may have died long ago.
        """
        return job in self._pulses and self._pulses[job].moved
