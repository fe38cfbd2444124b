"""Roll call: which islands are at work on a run, and on what; each is looked at until it gives a sign of life."""

import time
from collections.abc import Callable

from ddm_ray.islands.presence import Presence, workers
from ddm_ray.storage.observer import LOOK_SECONDS
from ddm_ray.storage.store import Store


def roll_call(
    store: Store, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> dict[Presence, bool]:
    """The newest note of each worker that hasn't ended, and whether it has moved while it was looked at.

    Takes until all have moved, or two beats of those that haven't are missing: half a minute mostly, at most.
    """
    first = {each.id: each.beat for each in workers(store)}
    began = clock()
    while True:
        notes = [each for each in workers(store) if not each.ended]
        moved = {each: first.get(each.id) != each.beat for each in notes}
        if all(moved[each] or clock() - began > 2.5 * each.beat_seconds for each in notes):
            return moved
        sleep(LOOK_SECONDS)


def line(presence: Presence, lives: bool) -> str:
    """One line of a table on a worker: its island, what it does, where it runs."""
    doing = f"trains {presence.holds}" if presence.holds else f"waits: {presence.waits or 'starting'}"
    sign = "" if lives else "no sign of life, "
    speed = f", {presence.speed:.2g} FLOP/s" if presence.speed else ""
    where = " ".join(filter(None, (presence.host, presence.job)))
    return f"{presence.island:<16} {sign}{doing}{speed} (worker {presence.number}{f' on {where}' if where else ''})"
