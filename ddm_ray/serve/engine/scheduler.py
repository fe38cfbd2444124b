"""Requests in order of their deadlines: which run next, and which are refused at once since they would come too late.

Plain classes without a model, a thread or a clock: times are seconds of the caller's clock.
"""

import bisect
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from ddm_ray.errors import ServeError

MAX_ROWS = 32
"""Rows of a batch, unless a configuration gives another number."""
MAX_TIMEOUT_S = 300.0
"""Seconds that a request may take."""
REQUEST_TIMEOUT_S = MAX_TIMEOUT_S + 30
"""Seconds after which Serve ends a request that its engine should have ended before."""


class OverloadedError(ServeError):
    """There is more work than can be done in time. `retry_after_s`: seconds after which there may be less."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type["OverloadedError"], tuple[str, float]]:
        return type(self), (self.message, self.retry_after_s)


@dataclass(eq=False)
class Job:
    """Rows of one request that run together: `velocities` to go, each of `rows_each` rows of networks at most.

    `rows` of a batch; `deadline`: the time after which the caller doesn't want them any more.
    """

    rows: int
    velocities: int
    rows_each: float
    deadline: float

    @property
    def work(self) -> float:
        """Rows of networks to go."""
        return self.velocities * self.rows_each


LEAP = 4.0
"""A velocity counts at most so many times its usual seconds."""


class Speed:
    """Seconds that a velocity of a batch takes, `fixed + each * rows` of networks, learnt from velocities that ran.

    It is a line through batches of many sizes, or through 0 if all have one size. Older batches count less.
    """

    def __init__(self, memory: float = 0.95):
        self._memory = memory
        self.forget()

    def forget(self) -> None:
        """Start without any measurement."""
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._line = 0.0, 0.0
        self._newest = deque[tuple[float, float]](maxlen=9)

    def ran(self, rows: float, seconds: float) -> None:
        """Learn from one velocity of a batch. It counts at most as LEAP times the usual seconds.

        So a velocity that waited for an expert that died makes no request refused, and a lasting change is soon learnt.
        """
        self._newest.append((rows, seconds))
        if self._n:
            seconds = min(seconds, LEAP * max(self.seconds(rows), self._y / self._n))
        kept = self._memory
        self._n, self._x, self._y = kept * self._n + 1, kept * self._x + rows, kept * self._y + seconds
        self._xx, self._xy = kept * self._xx + rows * rows, kept * self._xy + rows * seconds
        if self._x:
            self._line = self._fitted()

    @property
    def median_ratio(self) -> float:
        """Median of measured by expected seconds of the newest nine, 1 at most: a few that waited don't count.

        0 before nine have run.
        """
        ratios = [seconds / self.seconds(rows) for rows, seconds in self._newest if self.seconds(rows)]
        return min(1.0, median(ratios)) if len(ratios) == self._newest.maxlen else 0.0

    def seconds(self, rows: float) -> float:
        """Seconds that a velocity of so many rows of networks takes; 0 before any ran."""
        fixed, each = self._line
        return fixed + each * rows

    def _fitted(self) -> tuple[float, float]:
        through_origin = self._y / self._x
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-6 * self._x * self._x:
            return 0.0, through_origin
        each = (self._n * self._xy - self._x * self._y) / spread
        fixed = (self._y - each * self._x) / self._n
        return (0.0, through_origin) if each < 0 or fixed < 0 else (fixed, each)


HOPE = 1.2
"""A job that needs, alone, more than so many times its remaining seconds is hopeless; others don't wait for it."""

LOOK_SECONDS = 0.05
"""Pause between looks for jobs that can't be in time any more."""

SWAPS = 4
"""Swaps for which an engine waits at most until it computes, if other engines have work, too."""


@dataclass
class SharedDevice:
    """A device that the jobs of several schedulers wait for; a swap to another scheduler's takes `swap_s` seconds.

    `jobs`: all of them with their schedulers, the earliest deadline first. Schedulers without a job cost nothing, since
    a device may have one for each of hundreds of experts.
    """

    jobs: "list[tuple[Scheduler, Job]]" = field(default_factory=list)
    swap_s: float = 0.0
    _looks_at: float = field(default=-math.inf, init=False)
    _lost: "frozenset[Job]" = field(default=frozenset(), init=False)

    def add(self, scheduler: "Scheduler", job: Job) -> None:
        """Add a job that its scheduler has admitted."""
        bisect.insort(self.jobs, (scheduler, job), key=_deadline_of_owned)

    def remove(self, scheduler: "Scheduler", job: Job) -> None:
        """Forget a job that its scheduler has dropped."""
        self.jobs.remove((scheduler, job))

    def wait_s(self, *others: "Scheduler") -> float:
        """Seconds for which a scheduler waits for its turn, if those with jobs and `others` take turns."""
        return self.swap_s * (1 if len({*others, *(owner for owner, _ in self.jobs)}) == 1 else SWAPS)

    def lost(self, now: float) -> "frozenset[Job]":
        """Jobs that were to be given up at the last look: one for all schedulers, every LOOK_SECONDS."""
        if now >= self._looks_at:
            self._looks_at, self._lost = now + LOOK_SECONDS, frozenset(self.to_give_up(now))
        return self._lost

    def to_give_up(self, now: float) -> list[Job]:
        """Jobs to give up, so that most others are in time: the largest until a missed deadline (Moore 1968).

        They are found by what velocities of each scheduler took lately.
        """
        given_up, kept = list[Job](), list[tuple[Scheduler, Job]]()
        due = Load((), self.wait_s(), lately=True)
        for owner, job in self.jobs if len(self.jobs) > 1 else ():  # a job alone is tried until its deadline
            kept.append((owner, job))
            due.add(owner, job)
            while kept and due.seconds > job.deadline - now:
                largest = max(kept, key=lambda owned: owned[1].work)
                kept.remove(largest)
                due = Load(kept, due.wait_s, lately=True)
                given_up.append(largest[1])
        return given_up


class Scheduler:
    """Jobs by their deadlines, the earliest first, as many at a time as can share a batch.

    No order meets more deadlines as long as all can be met (Liu and Layland 1973), which `admit` ensures. A long job
    has a late deadline, so it never holds up a short one.
    """

    def __init__(
        self,
        max_rows: int = MAX_ROWS,
        max_waiting_rows: int = 1024,
        margin: float = 1.5,
        device: SharedDevice | None = None,
    ):
        """`max_rows` of a batch; `margin`: factor by which a job may take longer than expected.

        `device`: one that other schedulers share; then `admit` counts their jobs, too.
        """
        self.max_rows, self.max_waiting_rows, self._margin = max_rows, max_waiting_rows, margin
        self.speed = Speed()
        self._jobs: list[Job] = []
        self.device = SharedDevice() if device is None else device

    @property
    def jobs(self) -> Sequence[Job]:
        """All admitted jobs that aren't dropped, the earliest deadline first."""
        return self._jobs

    @property
    def rows(self) -> int:
        """Rows of all jobs."""
        return sum(job.rows for job in self._jobs)

    def admit(self, job: Job, now: float) -> None:
        """Admit a job. OverloadedError if it, or another because of it, would come too late, or for too many rows.

        A job alone is always admitted.
        """
        self._require_time(job, now)
        bisect.insort(self._jobs, job, key=_deadline)
        self.device.add(self, job)

    def _require_time(self, job: Job, now: float) -> None:
        jobs, most = self.device.jobs, self.max_waiting_rows
        if not jobs:
            return
        wait = self.device.wait_s(self)
        rows = sum(other.rows for _, other in jobs)
        if rows + job.rows > most:
            raise OverloadedError(f"{rows} images are being made or wait, of {most} at most", Load(jobs, wait).seconds)
        position = bisect.bisect_right(jobs, job.deadline, key=_deadline_of_owned)
        due, with_it = Load(jobs[:position], wait), Load([*jobs[:position], (self, job)], wait)
        own = [other for owner, other in jobs[:position] if owner is self]
        alone = 0.0 if self._can_share(own, job, now) else job.velocities * self.speed.seconds(job.rows_each)
        # What it takes beyond its share of full batches, if it can have none with those before it.
        apart = max(0.0, due.seconds + alone - with_it.seconds)
        late = self._margin * (with_it.seconds + apart) - (job.deadline - now)
        for owner, other in jobs[position:]:
            due.add(owner, other)
            with_it.add(owner, other)
            left = other.deadline - now
            # A hopeless job refuses no other.
            if due.seconds <= HOPE * left:
                late = max(late, self._margin * (with_it.seconds + apart) - left)
        if late > 0:
            raise OverloadedError("more images are asked for than can be made in time", late)

    def _can_share(self, before: Sequence[Job], job: Job, now: float) -> bool:
        """True if a job and all those before it can have batches in common without making one of those late."""
        rows, rows_each = sum(each.rows for each in (*before, job)), sum(each.rows_each for each in (*before, job))
        seconds = self.speed.seconds(rows_each * min(1.0, self.max_rows / rows))
        return all(seconds <= self._slowest(each, now) for each in before)

    def _slowest(self, job: Job, now: float) -> float:
        """Seconds that a velocity of the job's batch may take: more might make it late, unless it is hopeless."""
        alone, left = self.speed.seconds(job.rows_each), (job.deadline - now) / max(1, job.velocities)
        # All of the margin would make batches small for each job that has waited, and all that come after it late.
        return max(alone, left / math.sqrt(self._margin)) if alone <= HOPE * left else math.inf

    def batch(self, now: float) -> list[Job]:
        """Jobs of the next velocity: none makes an earlier one late that could be in time without it."""
        chosen, rows, rows_each, slowest = list[Job](), 0, 0.0, math.inf
        for job in self._jobs:
            seconds = self.speed.seconds(rows_each + job.rows_each)
            if chosen and (rows + job.rows > self.max_rows or seconds > slowest):
                break  # a smaller job with a later deadline would only hold this one up
            chosen.append(job)
            rows, rows_each = rows + job.rows, rows_each + job.rows_each
            slowest = min(slowest, self._slowest(job, now))
        return chosen

    def late(self, now: float) -> list[Job]:
        """Jobs after their deadline."""
        return self._jobs[: bisect.bisect_right(self._jobs, now, key=_deadline)]

    def lost(self, now: float) -> list[Job]:
        """Jobs of this scheduler to give up: see `SharedDevice.lost`."""
        lost = self.device.lost(now)
        return [job for job in self._jobs if job in lost] if lost else []

    def drop(self, job: Job) -> None:
        """Forget a job that is done, late or cancelled."""
        self._jobs.remove(job)
        self.device.remove(self, job)

    def seconds(self, jobs: "JobSum") -> float:
        """Seconds until all of these are done, in batches as full as possible."""
        if not jobs.velocities:  # all are done, and about to be dropped
            return 0.0
        together = jobs.rows_each * min(1.0, self.max_rows / jobs.rows)
        velocities = max(jobs.velocities, jobs.work / together)
        return velocities * self.speed.seconds(jobs.work / velocities)


@dataclass
class JobSum:
    """Work, rows and rows of networks a velocity of some jobs, and the velocities of the longest."""

    work: float = 0.0
    rows: int = 0
    rows_each: float = 0.0
    velocities: int = 0

    def add(self, job: Job) -> None:
        self.work += job.work
        self.rows += job.rows
        self.rows_each += job.rows_each
        self.velocities = max(self.velocities, job.velocities)


class Load:
    """Jobs of some schedulers, and the `seconds` until all are done: each scheduler's, after it has waited `wait_s`.

    `lately`: by the median of each scheduler's newest velocities.
    """

    def __init__(self, jobs: Iterable[tuple[Scheduler, Job]], wait_s: float, lately: bool = False):
        self._sums: dict[Scheduler, JobSum] = {}
        self._seconds: dict[Scheduler, float] = {}
        self.wait_s, self._lately = wait_s, lately
        for scheduler, job in jobs:
            self.add(scheduler, job)

    def add(self, scheduler: Scheduler, job: Job) -> None:
        self._sums.setdefault(scheduler, JobSum()).add(job)
        self._seconds.pop(scheduler, None)

    @property
    def seconds(self) -> float:
        for scheduler in self._sums.keys() - self._seconds.keys():
            ratio = scheduler.speed.median_ratio if self._lately else 1.0
            self._seconds[scheduler] = ratio * (scheduler.seconds(self._sums[scheduler]) + self.wait_s)
        return sum(self._seconds.values())


def _deadline(job: Job) -> float:
    return job.deadline


def _deadline_of_owned(owned: tuple[Scheduler, Job]) -> float:
    return owned[1].deadline
