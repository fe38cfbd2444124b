"""Roll call: which islands are at work on a run, and on what; each is looked at until it gives a sign of life."""

import math
import time
from collections.abc import Callable

from ddm_ray.islands.worker_heartbeat import WorkerState, workers
from ddm_ray.jobs.judge import Sightings
from ddm_ray.jobs.observer import LOOK_SECONDS
from ddm_ray.spelling import duration
from ddm_ray.store.store import Store


def list_workers(
    store: Store, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> dict[WorkerState, bool]:
    """The newest note of each worker that hasn't ended, and whether it has moved while it was looked at.

    Takes until all have moved, or half the lease of those that haven't has passed: half a minute mostly, at most.
    """
    first = {each.id: each.beat for each in workers(store)}
    began = clock()
    while True:
        notes = [each for each in workers(store) if not each.ended]
        moved = {each: first.get(each.id) != each.beat for each in notes}
        if all(moved[each] or clock() - began > each.lease_seconds / 2 for each in notes):
            return moved
        sleep(LOOK_SECONDS)


def line(presence: WorkerState, lives: bool) -> str:
    """One line of a table on a worker: its island, what it does, where it runs."""
    return f"{presence.island:<16} {'' if lives else 'no sign of life, '}{words(presence)}"


def words(presence: WorkerState) -> str:
    """Words on what a worker does, and where it runs."""
    doing = f"trains {presence.holds}" if presence.holds else f"waits: {presence.waits or 'starting'}"
    speed = f", {presence.speed:.2g} FLOP/s" if presence.speed else ""
    where = " ".join(filter(None, (presence.host, presence.job)))
    return f"{doing}{speed} (worker {presence.number}{f' on {where}' if where else ''})"


RARELY = 10
"""Times a usual silence that a worker is taken for gone, and looks of which one asks for it again."""


class WorkerTable:
    """Roll call again and again, as often as it is asked for; storage is asked each `every` seconds at most.

    A worker is silent once its beat has stood still for its lease in this observer's sight.
    """

    def __init__(self, store: Store, every: float):
        self._store, self._every = store, every
        self._sightings, self._ended, self._seen = Sightings(), set[str](), set[str]()
        self._silent, self._number = dict[str, WorkerState](), 0
        self._rows, self._asked_at = list[tuple[str, str, bool]](), -math.inf

    def rows(self, now: float) -> list[tuple[str, str, bool]]:
        """A row for each island that is at work, or was since this began: its name, what it does, True if it is silent.

        `now` is a reading of the observer's own clock in seconds.
        """
        if now - self._asked_at >= self._every:
            self._rows, self._asked_at = self._ask(now), now
        return self._rows

    def _ask(self, now: float) -> list[tuple[str, str, bool]]:
        # Each read is paid for, and those who were killed never end: after a while they are rarely looked at.
        known = {} if self._number % RARELY == 0 else self._silent
        self._number += 1
        notes = [*workers(self._store, self._ended | known.keys()), *known.values()]
        self._ended |= {each.id for each in notes if each.ended}
        self._silent = {}
        by_island: dict[str, list[tuple[float, WorkerState]]] = {}
        for each in notes:
            if not each.ended:
                silence = self._sightings.see(each.id, each.beat, now)
                most = each.lease_seconds
                by_island.setdefault(each.island, []).append((0.0 if silence <= most else silence, each))
                if silence > RARELY * most:
                    self._silent[each.id] = each
        self._seen |= by_island.keys()
        return [_row(island, by_island.get(island, [])) for island in sorted(self._seen)]


def _row(island: str, at_work: list[tuple[float, WorkerState]]) -> tuple[str, str, bool]:
    """The row of an island: of its workers that live the oldest works, and others stand by."""
    if not at_work:
        return island, "has left", False
    silence, first = min(at_work, key=lambda pair: (pair[0] > 0, pair[1].number))
    if silence:
        return island, f"no sign of life for {duration(silence)}, {words(first)}", True
    others = sum(not each for each, _ in at_work) - 1
    return island, words(first) + (f", {others} more stand{'s' if others == 1 else ''} by" if others else ""), False
