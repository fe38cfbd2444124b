"""The scheduler that swaps experts' weights in and out of a device's slots. No Ray, no HTTP, no clock of its own.

A swap brings an expert's weights into a slot, in place of another's.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ddm_ray.serve.engine.scheduler import SharedDevice, Speed

MIXING = -1
"""Number of the engine that mixes experts within a step, beside the experts' own."""


@dataclass(frozen=True)
class Decision:
    """Run a velocity of engine `run`; before it, fetch expert `fetch` in place of `leaving` (None: a slot is free)."""

    run: int
    fetch: int | None = None
    leaving: int | None = None


class SwapScheduler(SharedDevice):
    """Chooses the experts in the device's slots: the earliest deadline first, but an expert that came stays a while.

    An absent expert with work takes the slot of the least recently used expert without work. If all experts here have
    work, it displaces the one with the latest deadline, provided that its own deadline is earlier and that the time of
    two swaps has passed since the last displacement. So swaps take at most half of the time, and the most urgent engine
    waits for SWAPS swaps at most. The experts that are here compute while a swap is under way. The engine that mixes
    needs all slots: it displaces all experts, or is displaced.
    """

    def __init__(self, num_experts: int, num_slots: int):
        super().__init__()
        self._num_slots, self._all_fit, self._swap = num_slots, num_experts <= num_slots, Speed()
        self._settled, self._mixes = -math.inf, False

    def swapped(self, seconds: float) -> None:
        """Learn from one swap."""
        self._swap.ran(1, seconds)
        self.swap_s = self._swap.seconds(1)

    def next(self, deadlines: Mapping[int, float], here: Collection[int], coming: int | None, now: float) -> Decision:
        """Decide on the next velocity. `deadlines`: the earliest of each engine that has work; at least one has.

        `here`: experts with their weights in a slot, the least recently used first. `coming`: the expert with its
        weights on their way.
        """
        if coming is not None and coming not in deadlines:
            here, coming = [*here, coming], None  # no job waits for it any more
        order = sorted(deadlines, key=lambda engine: (deadlines[engine], engine))
        settled, holding = now >= self._settled, [MIXING] if self._mixes else [*here, coming]
        mixes = order[0] == MIXING if settled or not any(each in deadlines for each in holding) else self._mixes
        if mixes is not self._mixes:
            self._displaced(now)
            self._mixes = mixes
        if mixes:
            return Decision(MIXING)
        fetch = leaving = None
        absent = next((each for each in order if each not in (*here, coming, MIXING)), None)
        if absent is not None and coming is None:
            if len(here) < self._num_slots:
                fetch = absent
            else:
                latest = max(here, key=lambda expert: deadlines.get(expert, math.inf))
                if latest not in deadlines:
                    fetch, leaving = absent, latest
                elif settled and deadlines[latest] > deadlines[absent]:
                    fetch, leaving = absent, latest
                    self._displaced(now)
        run = next((each for each in order if each in here and each != leaving), fetch if coming is None else coming)
        assert run is not None
        return Decision(run, fetch, leaving)

    def _displaced(self, now: float) -> None:
        """Displace no engine with work until this swap has ended, and for as long again."""
        if not self._all_fit:
            self._settled = now + 2 * self.swap_s
