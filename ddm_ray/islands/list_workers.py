"""Lists the workers of all islands on a run and what they do. Each is observed until it gives a sign of life."""

import math
import time
from collections.abc import Callable

from ddm_ray.islands.worker_heartbeat import WorkerState, read_workers
from ddm_ray.jobs.judge import Sightings
from ddm_ray.jobs.observer import LOOK_SECONDS
from ddm_ray.spelling import duration
from ddm_ray.store.store import Store


def list_workers(
    store: Store, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> dict[WorkerState, bool]:
    """The newest heartbeat of each worker that hasn't ended, and whether it has changed while it was observed.

    This takes until all have changed, or until half the lease of the others has passed: usually at most half a minute.
    """
    first = {each.id: each.beat for each in read_workers(store)}
    began = clock()
    while True:
        notes = [each for each in read_workers(store) if not each.ended]
        moved = {each: first.get(each.id) != each.beat for each in notes}
        if all(moved[each] or clock() - began > each.lease_seconds / 2 for each in notes):
            return moved
        sleep(LOOK_SECONDS)


def worker_line(worker: WorkerState, lives: bool) -> str:
    """One line of a table on a worker: its island, what it does, where it runs."""
    return f"{worker.island:<16} {'' if lives else 'no sign of life, '}{worker_words(worker)}"


def worker_words(worker: WorkerState) -> str:
    """Words on what a worker does, and where it runs."""
    doing = f"trains {worker.holds}" if worker.holds else f"waits: {worker.waits or 'starting'}"
    speed = f", {worker.speed:.2g} FLOP/s" if worker.speed else ""
    where = " ".join(filter(None, (worker.host, worker.job)))
    return f"{doing}{speed} (worker {worker.number}{f' on {where}' if where else ''})"


class WorkerTable:
    """A table of all islands' workers for repeated display. Storage is read at most once in `every` seconds.

    A worker is silent once this observer has seen no change of its counter for the length of its lease.
    """

    def __init__(self, store: Store, every: float):
        self._store, self._every = store, every
        self._sightings, self._ended, self._seen = Sightings(), set[str](), set[str]()
        self._rows, self._asked_at = list[tuple[str, str, bool]](), -math.inf

    def rows(self, now: float) -> list[tuple[str, str, bool]]:
        """A row for each island seen at work since the start: its name, what it does, True if it is silent.

        `now`: seconds by the observer's clock.
        """
        if now - self._asked_at >= self._every:
            self._rows, self._asked_at = self._ask(now), now
        return self._rows

    def _ask(self, now: float) -> list[tuple[str, str, bool]]:
        notes = read_workers(self._store, self._ended)
        self._ended |= {each.id for each in notes if each.ended}
        by_island: dict[str, list[tuple[float, WorkerState]]] = {}
        for each in notes:
            if not each.ended:
                silence = self._sightings.see(each.id, each.beat, now)
                silence = 0.0 if silence <= each.lease_seconds else silence
                by_island.setdefault(each.island, []).append((silence, each))
        self._seen |= by_island.keys()
        return [_row(island, by_island.get(island, [])) for island in sorted(self._seen)]


def _row(island: str, at_work: list[tuple[float, WorkerState]]) -> tuple[str, str, bool]:
    """The row of an island. The oldest of its living workers trains; the others stand by."""
    if not at_work:
        return island, "has left", False
    silence, first = min(at_work, key=lambda pair: (pair[0] > 0, pair[1].number))
    if silence:
        return island, f"no sign of life for {duration(silence)}, {worker_words(first)}", True
    others = sum(not each for each, _ in at_work) - 1
    by = f", {others} more stand{'s' if others == 1 else ''} by" if others else ""
    return island, worker_words(first) + by, False
