"""Loads of unequal islands on which nothing goes wrong, their makespans under a rule, and what no rule can beat."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from ddm_ray.islands.choose import MOVE_SECONDS, Choice, OpenJob, Worker
from ddm_ray.run.graph import MONOLITH, ROUTER, Artifact, expert

Rule = Callable[[Sequence[OpenJob], Sequence[Worker], str, frozenset[Artifact]], Choice]
WORK = 100_000.0
"""FLOP of an expert: more than a day on the slowest island, beside which a move costs little."""


@dataclass
class Load:
    """Speeds of islands, FLOP/s, and the work of each artifact, FLOP."""

    speeds: tuple[float, ...]
    works: dict[Artifact, float]
    moves: int = 0

    @classmethod
    def of(cls, islands: int, experts: int, spread: float, seed: int) -> "Load":
        """Speeds from 1 to `spread`, uniform in their logarithm, for a run that begins or (every other seed) goes on.

        Experts cost the same, the router some of that; of a run that goes on each has some steps left. Some runs have
        a monolith, which costs as much as all experts.
        """
        chance = random.Random(f"{islands} {experts} {spread} {seed}")
        speeds = tuple(spread ** chance.random() for _ in range(islands))
        works = {expert(index): WORK for index in range(experts)} | {ROUTER: WORK * chance.uniform(0.05, 1)}
        if chance.random() < 0.2:
            works[MONOLITH] = WORK * experts
        if seed % 2:
            works = {artifact: work * chance.uniform(0.02, 1) for artifact, work in works.items()}
        return cls(speeds, works)

    @property
    def lower_bound(self) -> float:
        """Seconds that every schedule takes, also one that knows everything; the largest of two bounds for each k.

        The k largest jobs run on at most k islands at a time: they take their work over the speed of the k fastest (of
        all, for all jobs). And each is done by one island: who does j of them does no less than the j smallest of
        them, so the k-th soonest end of such islands, one job more at a time, is too soon for none.
        """
        works = sorted(self.works.values(), reverse=True)
        speeds = sorted(self.speeds, reverse=True)
        fastest = list(accumulate(speeds))
        shared = max(work / fastest[min(index, len(speeds) - 1)] for index, work in enumerate(accumulate(works)))
        return max(shared, *(self._counted(works[:many]) for many in range(1, len(works) + 1)))

    def _counted(self, works: list[float]) -> float:
        """Seconds until as many are done as these, if every island is given the smallest, of which there are plenty."""
        smallest = list(accumulate(reversed(works)))
        ends = [(smallest[0] / speed, speed, 1) for speed in self.speeds]
        heapq.heapify(ends)
        for _ in works[1:]:
            _, speed, done = ends[0]
            heapq.heapreplace(ends, (smallest[done] / speed if done < len(works) else inf, speed, done + 1))
        return ends[0][0]

    def makespan(self, rule: Rule) -> float:
        """Seconds until all is done, if each island that is idle chooses by this rule whenever something ends.

        A job that is taken over is begun MOVE_SECONDS later elsewhere, where it was. Raises AssertionError if nothing
        is trained, and yet not all is done.
        """
        workers = [Worker(f"{index:02d}/0000", speed) for index, speed in enumerate(self.speeds)]
        speeds = {worker.id: worker.speed or 0.0 for worker in workers}
        jobs = {artifact: OpenJob(artifact, work) for artifact, work in self.works.items()}
        ends: dict[str, tuple[float, Artifact]] = {}  # by worker
        now = 0.0
        while jobs:
            for worker, (end, artifact) in ends.items():
                left = end - now
                jobs[artifact] = replace(jobs[artifact], work=max(left * speeds[worker], 1e-6), seconds_left=left)
            idle = [worker.id for worker in workers if worker.id not in ends]
            while idle:
                worker = idle.pop(0)
                taken = rule(list(jobs.values()), workers, worker, frozenset()).take
                if taken is None:
                    continue
                if taken.holder:
                    del ends[taken.holder]
                    idle.append(taken.holder)
                    self.moves += 1
                left = taken.work / speeds[worker] + (MOVE_SECONDS if taken.holder else 0.0)
                ends[worker] = now + left, taken.artifact
                jobs[taken.artifact] = replace(taken, holder=worker, seconds_left=left)
            assert ends, f"all wait for {sorted(jobs)}"
            worker = min(ends, key=lambda each: ends[each])
            now, artifact = ends.pop(worker)
            del jobs[artifact]
        return now


def take_alone(jobs: Sequence[OpenJob], workers: Sequence[Worker], me: str, barred: frozenset[Artifact]) -> Choice:
    """A control: the most work to whoever is idle, which keeps it."""
    free = [job for job in jobs if job.free]
    return Choice(max(free, key=lambda job: job.work) if free else None)


def ratios(spread: float, loads: int, most: int, rule: Rule) -> list[float]:
    """Makespans over lower bounds of seeded loads, the last the largest: `most` islands, of 3 to 12 experts each."""
    chance, quotients = random.Random(7), []
    for seed in range(loads):
        islands = max(2, round(most * (seed + 1) / loads))
        load = Load.of(islands, min(4 * most, islands * chance.randint(3, 12)), spread, seed)
        quotients.append(load.makespan(rule) / load.lower_bound)
    return quotients
