"""Whose velocity is next, among engines of many experts that share few places for weights; and who is let in to them.

Plain classes without a model, a thread or a clock: times are seconds on whichever clock their caller reads. To fetch
an expert's weights in place of another's is a swap.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby

from ddm_ray.serve.scheduler import HOPE, Job, Load, Scheduler, Speed

MIXING = -1
"""The engine that mixes experts within a step, among the numbers of experts."""


@dataclass(frozen=True)
class Decision:
    """A velocity of engine `run`, and before it begins a swap: expert `fetch` for `leaving` (None: a place is free)."""

    run: int
    fetch: int | None = None
    leaving: int | None = None


class Turns:
    """Engines by their earliest deadlines, but weights that were fetched stay until they were worth it.

    An expert makes room for another with an earlier deadline once it has no work, or has computed for `quantum`
    seconds since it came: so long that swaps, even if nothing computed meanwhile, take at most `share` of the time of
    experts that have work. While the next is on its way those compute that are there. The engine that mixes takes all
    places: it waits until each may be left, and is held to the same quantum.
    """

    def __init__(self, num_experts: int, places: int, share: float = 0.25):
        self.places, self.share = places, share
        self._all_fit = num_experts <= places
        self.schedulers: list[SharedScheduler] = []
        self._swap = Speed()
        self._ready, self._computed = dict[int, float](), dict[int, float]()
        self._mixes = False

    @property
    def swap_s(self) -> float:
        """Seconds that a swap takes, learnt from those that were."""
        return self._swap.seconds(1)

    @property
    def quantum(self) -> float:
        """Seconds of computing that are worth a swap; 0 where nobody ever leaves."""
        return 0.0 if self._all_fit else self.swap_s * (1 - self.share) / self.share

    def swapped(self, seconds: float) -> None:
        """Learn from one swap."""
        self._swap.ran(1, seconds)

    def fetched(self, expert: int, ready: float) -> None:
        """Note that an expert's weights were sent for, and will be there at about this time."""
        self._ready[expert], self._computed[expert] = ready, 0.0

    def ran(self, engine: int, began: float, ended: float) -> None:
        """Note a velocity of an engine, or several."""
        if (engine == MIXING) is not self._mixes:
            # Whichever it is, it finds the other's weights in its places.
            self._mixes = engine == MIXING
            self._computed.clear()
        computed = max(0.0, ended - max(began, self._ready.get(engine, began)))
        self._computed[engine] = self._computed.get(engine, 0.0) + computed

    def next(self, deadlines: Mapping[int, float], here: Collection[int], coming: int | None = None) -> Decision:
        """Decide what to do now. `deadlines`: the earliest of each engine that has work, one at least.

        `here`: experts whose weights are there; `coming`: the one whose are on their way.
        """
        if coming is not None and coming not in deadlines:
            here, coming = [*here, coming], None  # nobody waits for it any more
        order = sorted(deadlines, key=lambda engine: (deadlines[engine], engine))
        fetchable = order
        if MIXING in deadlines:
            if self._mixes and not self._may_leave(MIXING, deadlines):
                return Decision(MIXING)
            if order[0] == MIXING:
                holding = [] if self._mixes else [*here] if coming is None else [*here, coming]
                staying = [expert for expert in order if expert in holding and not self._may_leave(expert, deadlines)]
                return Decision(staying[0] if staying else MIXING)
            # Who comes later than the engine that mixes would only keep it waiting.
            fetchable = order[: order.index(MIXING)]
        fetch = leaving = None
        absent = [expert for expert in fetchable if expert not in here and expert != coming]
        if absent and coming is None:
            leaving = self._leaving(absent[0], deadlines, here)
            if leaving is not None or len(here) < self.places:
                fetch = absent[0]
        ready = [expert for expert in order if expert in here and expert != leaving]
        if absent and coming is None and fetch is None and deadlines[ready[0]] > deadlines[absent[0]]:
            # Whoever is next to be worth its swap makes room soonest.
            return Decision(max(ready, key=lambda expert: self._computed.get(expert, 0.0)))
        run = ready[0] if ready else fetch if coming is None else coming
        assert run is not None
        return Decision(run, fetch, leaving)

    def _leaving(self, following: int, deadlines: Mapping[int, float], here: Collection[int]) -> int | None:
        """The expert that makes room for another: one without work, or else the one whose deadline is the latest."""
        if len(here) < self.places:
            return None
        waiting = deadlines[following]
        willing = [
            expert
            for expert in here
            if expert not in deadlines or (self._may_leave(expert, deadlines) and deadlines[expert] > waiting)
        ]
        return max(willing, key=lambda expert: deadlines.get(expert, math.inf), default=None)

    def _may_leave(self, engine: int, deadlines: Mapping[int, float]) -> bool:
        return engine not in deadlines or self._computed.get(engine, 0.0) >= self.quantum

    def needed(self, load: Load) -> float:
        """Seconds until all jobs of a load are done, whoever else has work: with swaps."""
        due = sum(scheduler.places for scheduler in self.schedulers if scheduler in load.schedulers)
        # Each comes after somebody's quantum; if they don't fit, the earlier of them drive out the later.
        computing = load.seconds if self._all_fit or due <= self.places else load.seconds / (1 - self.share)
        return computing + due * (self.swap_s + self.quantum)


class SharedScheduler(Scheduler):
    """The jobs of one of the engines that take turns: let in if those of all engines can be met.

    `places`: how many of those for weights its engine takes.
    """

    def __init__(self, turns: Turns, max_rows: int = 32, places: int = 1, margin: float = 1.5):
        super().__init__(max_rows, margin=margin)
        self.places, self._turns = places, turns
        turns.schedulers.append(self)

    def batch(self, now: float) -> list[Job]:
        """Jobs of the next velocity. One that is due later than another engine's joins as far as that can wait."""
        chosen, due, elsewhere = super().batch(now), Load(), False
        if len(chosen) < 2:
            return chosen
        for deadline, jobs in groupby(self._competing(), key=lambda owned: owned[1].deadline):
            if deadline >= chosen[-1].deadline:
                break
            for owner, job in jobs:
                due.add(owner, job)
                elsewhere |= owner is not self
            left = deadline - now
            # Who is late already is made no later by much.
            if elsewhere and due.seconds <= HOPE * left:
                chosen = self._joining(chosen, deadline, max(0.0, left - self._margin * self._needed(due)))
        return chosen

    def _joining(self, chosen: list[Job], deadline: float, spare: float) -> list[Job]:
        """The first of these jobs, and as many that are due after the deadline as make the velocity longer by this."""
        first = sum(job.deadline <= deadline for job in chosen) or 1
        rows_each = sum(job.rows_each for job in chosen[:first])
        longest = self.speed.seconds(rows_each) + spare
        for number, job in enumerate(chosen[first:], first):
            rows_each += job.rows_each
            if self.speed.seconds(rows_each) > longest:
                return chosen[:number]
        return chosen

    def _competing(self) -> list[tuple[Scheduler, Job]]:
        owned = [(scheduler, job) for scheduler in self._turns.schedulers for job in scheduler.jobs]
        return sorted(owned, key=lambda pair: pair[1].deadline)

    def _needed(self, load: Load) -> float:
        return self._turns.needed(load)
