"""Loads of unequal islands on which nothing goes wrong, their makespans under a rule, and what no rule can beat."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from ddm_ray.islands.choose import Choice, OpenJob, Worker, choose
from ddm_ray.storage.graph import MONOLITH, ROUTER, Artifact, expert

Rule = Callable[[Sequence[OpenJob], Sequence[Worker], str], Choice]


@dataclass(frozen=True)
class Load:
    """Speeds of islands, FLOP/s, and the work of each artifact, FLOP."""

    speeds: tuple[float, ...]
    works: dict[Artifact, float]

    @classmethod
    def of(cls, islands: int, experts: int, spread: float, seed: int) -> "Load":
        """Speeds from 1 to `spread`, uniform in their logarithm, for a run that begins or (every other seed) goes on.

        Experts cost the same, the router some of that; of a run that goes on each has some steps left. Some runs have
        a monolith, which costs as much as all experts.
        """
        chance = random.Random(f"{islands} {experts} {spread} {seed}")
        speeds = tuple(spread ** chance.random() for _ in range(islands))
        works = {expert(index): 100.0 for index in range(experts)} | {ROUTER: 100 * chance.uniform(0.05, 1)}
        if chance.random() < 0.2:
            works[MONOLITH] = 100.0 * experts
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
        """Seconds until all is done, if each island that is free chooses by this rule whenever something ends.

        Raises AssertionError if nothing is trained, and yet not all is done.
        """
        workers = [Worker(f"{index:02d}/0000", speed) for index, speed in enumerate(self.speeds)]
        jobs = {artifact: OpenJob(artifact, work) for artifact, work in self.works.items()}
        idle, busy = dict.fromkeys(range(len(workers))), list[tuple[float, int, Artifact]]()
        now = 0.0
        while jobs:
            for end, index, artifact in busy:
                jobs[artifact] = replace(jobs[artifact], work=max((end - now) * self.speeds[index], 1e-6))
            for index in list(idle) if any(job.free for job in jobs.values()) else ():
                taken = rule(list(jobs.values()), workers, workers[index].id).take
                if taken is not None:
                    del idle[index]
                    heapq.heappush(busy, (now + jobs[taken].work / self.speeds[index], index, taken))
                    jobs[taken] = replace(jobs[taken], owner=workers[index].id)
            assert busy, f"all wait for {sorted(jobs)}"
            now, index, artifact = heapq.heappop(busy)
            del jobs[artifact]
            idle[index] = None
        return now


def longest_first(jobs: Sequence[OpenJob], workers: Sequence[Worker], me: str) -> Choice:
    """A control: the most work to whoever is free."""
    free = [job for job in jobs if job.free]
    return Choice(max(free, key=lambda job: job.work).artifact if free else None)


def without_rests(jobs: Sequence[OpenJob], workers: Sequence[Worker], me: str) -> Choice:
    """A control: the product's rule, to which who trains something is as good as done with it."""
    return choose([replace(job, work=1e-6) if job.owner else job for job in jobs], workers, me)


def ratios(spread: float, loads: int, most: int, rule: Rule) -> list[float]:
    """Makespans over lower bounds of seeded loads, the last the largest: `most` islands, of 3 to 12 experts each."""
    chance, quotients = random.Random(7), []
    for seed in range(loads):
        islands = max(2, round(most * (seed + 1) / loads))
        load = Load.of(islands, min(4 * most, islands * chance.randint(3, 12)), spread, seed)
        quotients.append(load.makespan(rule) / load.lower_bound)
    return quotients


def require_rule(jobs: Sequence[OpenJob], workers: Sequence[Worker], me: str, choice: Choice) -> None:
    """Raise AssertionError unless the choice is the rule's, whose plan is made here as plainly as can be.

    Who is idle waits only for jobs that the plan gives to others, who finish each before it could.
    """
    known = sorted(worker.speed for worker in workers if worker.speed is not None and 1e-6 <= worker.speed <= 1e30)
    usual = known[(len(known) - 1) // 2] if known else 1.0
    seconds = {worker.id: 1 / (worker.speed if worker.speed in known else usual) for worker in workers}  # type: ignore[operator]
    likely = sorted(job.work for job in jobs if 1e-6 <= job.work <= 1e40)
    works = {
        job.artifact: job.work if job.work in likely else likely[(len(likely) - 1) // 2] if likely else 1.0
        for job in jobs
    }
    order = sorted(jobs, key=lambda job: (-works[job.artifact], job.artifact))
    ready = dict.fromkeys(sorted(seconds), 0.0)
    for job in order:
        if job.owner in ready:
            ready[job.owner] += works[job.artifact]
    ready = {worker: rest * seconds[worker] for worker, rest in ready.items()}
    allowed = {worker.id: worker for worker in workers}
    if ready[me] > 0:
        assert choice.take is None, "it trains already"
        return
    for job in order:
        may = [worker for worker in ready if not allowed[worker].barred(frozenset({job.artifact}))]
        if not job.free or not may:
            continue
        own = works[job.artifact] * seconds[me]
        worker = min(may, key=lambda worker: ready[worker] + works[job.artifact] * seconds[worker])
        ready[worker] += works[job.artifact] * seconds[worker]
        if worker == me:
            assert choice.take == job.artifact, f"{me} is to take {job.artifact}, not {choice}"
            return
        assert me not in may or ready[worker] <= own
    assert choice.take is None, f"{me} is to wait, not to take {choice.take}"
