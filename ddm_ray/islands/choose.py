"""The choice of a worker: which unfinished job of a run it takes, if any. Pure: no storage, no clock, no Ray.

Earliest finish first. Of what nobody trains every worker makes the same plan, the most work first: a job goes to the
worker that would finish it first, given what each trains now and what the plan gave it before. So a slow island leaves
the last jobs to fast ones that are still busy, if these will be done with them sooner.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf
from operator import attrgetter
from statistics import median_low
from typing import NamedTuple

import numpy as np

from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.status import duration

# Presences are others' words: what lies outside these (nan too) is no speed, FLOP/s, and no job's work, FLOP.
_SPEEDS, _WORKS = (1e-6, 1e30), (1e-6, 1e40)
_MOST_SECONDS = 1e9  # a longer time says nothing to anybody
_MOST_LINES = 4


@dataclass(frozen=True)
class OpenJob:
    """An unfinished training job, as a look at storage shows it.

    `work`: FLOP left. `owner`: the id of the worker that trains it now, or any words for one that isn't a worker, as a
    training begun by hand; empty: nobody. `obstacle`: why nobody may take it now, in words; empty: nothing.
    """

    artifact: Artifact
    work: float
    owner: str = ""
    obstacle: str = ""

    @property
    def free(self) -> bool:
        """True if it may be taken now."""
        return not self.owner and not self.obstacle


@dataclass(frozen=True)
class Worker:
    """A living worker, as its presence tells. It takes what is in `only` (None: all) and not in `failed`.

    `speed`: FLOP/s, None if it isn't known yet. Workers agree on a plan only if `failed` is in their presences too.
    """

    id: str
    speed: float | None
    only: frozenset[str] | None = None
    failed: frozenset[str] = frozenset()

    def barred(self, artifacts: frozenset[str]) -> frozenset[str]:
        """Pick those of the artifacts that it may not take."""
        barred = artifacts & self.failed
        return barred if self.only is None else barred | (artifacts - self.only)


@dataclass(frozen=True)
class Choice:
    """The artifact that a worker takes now, or None and the `reason`: what it waits for, in words for people.

    `expects`, where it waits: the first job that the plan gives each other worker, and the seconds until it takes it
    (0: now, it is idle).
    """

    take: Artifact | None
    reason: str = ""
    expects: Mapping[str, tuple[Artifact, float]] = field(default_factory=dict)


def choose(jobs: Sequence[OpenJob], workers: Sequence[Worker], me: str) -> Choice:
    """The choice of worker `me`, the same in whichever order jobs and workers come.

    It takes the first job that the plan of all free jobs gives it, unless it trains one already. A speed that isn't
    known, or can't be, counts as the median of the others, or as 1 if none is known. `owner`s that are no workers train
    on, but are given nothing. Raises ValueError if `me` is none of the workers.
    """
    crew = sorted({worker.id: worker for worker in workers}.values(), key=attrgetter("id"))
    mine = next((index for index, worker in enumerate(crew) if worker.id == me), None)
    if mine is None:
        raise ValueError(f"{me} is none of the workers that it has to choose among")
    plan = _Plan(crew, _by_work(jobs))
    if plan.held[me]:
        return Choice(None, f"{me} trains {plan.held[me][0]}")
    expects: dict[str, tuple[Artifact, float]] = {}
    steps = []
    for step in plan.steps():
        if step.worker is crew[mine]:
            return Choice(step.job.artifact)
        if step.worker:
            expects.setdefault(step.worker.id, (step.job.artifact, step.start))
        steps.append(step)
    lines = list(islice(chain((step.line(mine) for step in steps), plan.others()), _MOST_LINES))
    more = [f"and {len(jobs) - len(lines)} more"] if len(jobs) > len(lines) else []
    return Choice(None, "; ".join([*lines, *more]) or "there is nothing to take", expects)


class _Step(NamedTuple):
    """A free job of the plan, who trains it (None: nobody may) and when, in seconds from now.

    `barred`: indices of workers that may not take it.
    """

    job: OpenJob
    worker: Worker | None
    start: float
    finish: float
    barred: Sequence[int]

    def line(self, me: int) -> str:
        """Words for the worker of this index, who waits for it."""
        if self.worker is None:
            return f"{self.job.artifact} may be taken by nobody who is here"
        how = "left to" if me in self.barred else "sooner done by"
        return f"{self.job.artifact} is {how} {self.worker.id}{_span(', in', self.worker, self.finish)}"


class _Plan:
    """All jobs by work, and when each worker (by id) is done with what it has."""

    def __init__(self, crew: list[Worker], queue: list[tuple[float, OpenJob]]):
        self._crew, self._queue = crew, queue
        self._seconds = 1 / np.array(_completed([worker.speed for worker in crew], *_SPEEDS))  # a FLOP
        self.held: dict[str, list[Artifact]] = {worker.id: [] for worker in crew}
        self._rest = dict.fromkeys(self.held, 0.0)
        for work, job in queue:
            if job.owner in self.held:
                self.held[job.owner].append(job.artifact)
                self._rest[job.owner] += work

    def steps(self) -> Iterator[_Step]:
        """Free jobs, each given to the worker that finishes it first, of equal ones to the first by id."""
        free = [(work, job) for work, job in self._queue if job.free]
        names = frozenset(job.artifact for _, job in free)
        barred: dict[str, list[int]] = {}
        for position, each in enumerate(self._crew):
            for name in each.barred(names):
                barred.setdefault(name, []).append(position)
        ready = np.array([self._rest[worker.id] for worker in self._crew]) * self._seconds
        for work, job in free:
            finishes = ready + work * self._seconds
            others = barred.get(job.artifact, [])
            if others:
                finishes[others] = inf
            index = int(finishes.argmin())
            finish = float(finishes[index])
            worker = self._crew[index] if finish < inf else None
            yield _Step(job, worker, float(ready[index]), finish, others)
            if worker:
                ready[index] = finish

    def others(self) -> Iterator[str]:
        """Words for each job that isn't free, those that are trained first."""
        seconds = dict(zip(self._rest, self._seconds, strict=True))
        workers = {worker.id: worker for worker in self._crew}
        for work, job in self._queue:
            if job.owner:
                left = _span(",", workers.get(job.owner), work * seconds.get(job.owner, inf))
                yield f"{job.artifact} is trained by {job.owner}{left and left + ' left'}"
        for _, job in self._queue:
            if job.obstacle and not job.owner:
                yield f"{job.artifact}: {job.obstacle}"


def _by_work(jobs: Sequence[OpenJob]) -> list[tuple[float, OpenJob]]:
    works = _completed([job.work for job in jobs], *_WORKS)
    return sorted(zip(works, jobs, strict=True), key=lambda pair: (-pair[0], pair[1].artifact))


def _completed(values: Sequence[float | None], least: float, most: float) -> list[float]:
    """The values; for each that isn't within these limits, the lower median of those that are, 1 if none is."""
    known = [value for value in values if value is not None and least <= value <= most]
    usual = median_low(known) if known else 1.0
    return [value if value is not None and least <= value <= most else usual for value in values]


def _span(before: str, worker: Worker | None, seconds: float) -> str:
    """A time for people after these words, empty where the worker's speed isn't known."""
    known = worker and worker.speed is not None and _SPEEDS[0] <= worker.speed <= _SPEEDS[1]
    return f"{before} {duration(seconds)}" if known and seconds <= _MOST_SECONDS else ""
