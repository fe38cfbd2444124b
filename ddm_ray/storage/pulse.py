"""Pulses: the judge of whether a job lives. A counter that changes is a sign of life; no two machines' clocks are read.

Pure: an observer brings what it read of storage, and readings of its own clock.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pulse:
    """A job's newest attempt and its heartbeat's counter, None before the first, as an observer saw them.

    `since`: a reading, in seconds, of the observer's own clock when it first saw these.
    """

    attempt: int
    beat: int | None
    since: float


class Pulses:
    """The pulses of many jobs, as one observer sees them."""

    def __init__(self) -> None:
        self._pulses: dict[str, Pulse] = {}

    def take(self, job: str, attempt: int, beat: int | None, now: float) -> float:
        """Seconds since this observer first saw the job's newest attempt and its counter as they are: 0 after a change.

        Whoever has just begun to look knows of no silence.
        """
        pulse = self._pulses.get(job)
        if pulse is None or (pulse.attempt, pulse.beat) != (attempt, beat):
            pulse = self._pulses[job] = Pulse(attempt, beat, now)
        return now - pulse.since
