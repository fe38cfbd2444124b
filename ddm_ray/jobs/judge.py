"""The judge of leases: which attempts of a job live. Pure: an observer brings what it read, and its own clock.

An attempt, as a worker of an island, has a lease: it renews it by a counter that changes, and announces its length. No
two machines' clocks are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["alive", "silent", "superseded", "dead"]
"""Verdict of an observer on an attempt: its counter has changed in sight; it may live; a newer attempt has its place;
it has ended, or its lease has expired."""


@dataclass(frozen=True)
class Lease:
    """The lease of attempt `number`, as it was read. It expires `seconds` after its `counter` has changed last.

    `step`: finished steps, while it trains; None: it doesn't yet. `saved`: it has committed a state. `ended`: it has
    noted its end.
    """

    number: int
    counter: int | str | None
    seconds: float
    step: int | None = None
    saved: bool = False
    ended: bool = False


@dataclass(frozen=True)
class _Sight:
    """A value, since when it is seen, in seconds of the observer's clock, and if it is another than the first."""

    value: object
    since: float
    changed: bool


class Sightings:
    """The counters that one observer has seen, by name: their last values, and since when it sees these."""

    def __init__(self) -> None:
        self._sights: dict[str, _Sight] = {}

    def see(self, name: str, value: object, now: float) -> float:
        """Seconds since this observer first saw the value: 0 after a change, and at the first look."""
        sight = self._sights.get(name)
        if sight is None or sight.value != value:
            sight = self._sights[name] = _Sight(value, now, sight is not None)
        return now - sight.since

    def changed(self, name: str) -> bool:
        """True if the value has changed in sight: what is seen first may be a dead one's."""
        return name in self._sights and self._sights[name].changed


def sight_of(job: str, number: int) -> str:
    """Name of an attempt's counter among the sightings of many jobs."""
    return f"{job}/{number}"


def takes_over(job: str, lease: Lease, seen: Sightings) -> bool:
    """True if the attempt has taken the place of those before it: by a state, or by steps that are seen to be done.

    Its counter alone isn't enough: it changes while nothing is trained yet.
    """
    return lease.saved or (not lease.ended and seen.changed(f"{sight_of(job, lease.number)} step"))


def judge(job: str, leases: Sequence[Lease], seen: Sightings, now: float) -> dict[int, Verdict]:
    """The verdicts on attempts of the job, by number, at `now`, seconds of the observer's clock."""
    verdicts: dict[int, Verdict] = {}
    overtaken = False
    for lease in sorted(leases, key=lambda lease: lease.number, reverse=True):
        name = sight_of(job, lease.number)
        silence = seen.see(name, lease.counter, now)
        if lease.step is not None:
            seen.see(f"{name} step", lease.step, now)
        if overtaken:
            verdicts[lease.number] = "superseded"
        elif lease.ended or silence > lease.seconds:
            verdicts[lease.number] = "dead"
        else:
            verdicts[lease.number] = "alive" if seen.changed(name) else "silent"
        overtaken = overtaken or takes_over(job, lease, seen)
    return verdicts
