"""The judge of leases decides which attempts of a job live. It is pure: an observer passes what it read and its clock.

An attempt, like an island's worker, has a lease. It announces the lease's length and renews it by a counter that
changes. Clocks of different machines are never compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["alive", "silent", "superseded", "dead"]
"""Verdict of an observer on an attempt.

Alive: its counter has changed while it was observed. Silent: it may live. Superseded: a newer attempt has its place.
Dead: it has ended, or its lease has expired.
"""


@dataclass(frozen=True)
class Lease:
    """The lease of attempt `number`, as it was read. It expires `seconds` after the last change of its `counter`.

    `step`: finished steps, or None before it trains. `saved`: it has committed a state. `ended`: it has noted its end.
    """

    number: int
    counter: int | str | None
    seconds: float
    step: int | None = None
    saved: bool = False
    ended: bool = False


@dataclass(frozen=True)
class _Sight:
    """A value, the time since which it is seen (by the observer's clock), and whether an earlier value was seen."""

    value: object
    since: float
    changed: bool


class Sightings:
    """The counters that one observer has seen, by name: their last values, and since when it has seen them."""

    def __init__(self) -> None:
        self._sights: dict[str, _Sight] = {}

    def see(self, name: str, value: object, now: float) -> float:
        """Seconds since this observer first saw the value: 0 after a change, and at the first look."""
        sight = self._sights.get(name)
        if sight is None or sight.value != value:
            sight = self._sights[name] = _Sight(value, now, sight is not None)
        return now - sight.since

    def changed(self, name: str) -> bool:
        """True if the value has changed while it was observed. The first value may be a dead attempt's."""
        return name in self._sights and self._sights[name].changed


def sight_of(job: str, number: int) -> str:
    """Name of an attempt's counter among the sightings of several jobs."""
    return f"{job}/{number}"


def has_overtaken(job: str, lease: Lease, seen: Sightings) -> bool:
    """True if the attempt supersedes those before it: it has saved a state, or was observed doing steps.

    Its counter isn't enough, since it changes before training begins.
    """
    return lease.saved or (not lease.ended and seen.changed(f"{sight_of(job, lease.number)} step"))


def judge(job: str, leases: Sequence[Lease], seen: Sightings, now: float) -> dict[int, Verdict]:
    """The verdicts on attempts of the job, by number. `now`: seconds by the observer's clock."""
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
        overtaken = overtaken or has_overtaken(job, lease, seen)
    return verdicts
