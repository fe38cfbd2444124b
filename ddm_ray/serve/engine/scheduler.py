"""Requests in order of their deadlines: which of them run next, and which can't be met and are refused at once.

A plain class without a model, a thread or a clock: times are seconds on whichever clock its caller reads.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ddm_ray.errors import ServeError

MAX_ROWS = 32
"""Rows of a batch, unless a configuration gives another number."""
MAX_TIMEOUT_S = 300.0
"""Seconds that a request may take."""
REQUEST_TIMEOUT_S = MAX_TIMEOUT_S + 30
"""Seconds after which Serve ends a request that its engine should have ended before."""


class OverloadedError(ServeError):
    """There is more work than can be done in time. `retry_after_s`: when it may be less."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type["OverloadedError"], tuple[str, float]]:
        return type(self), (self.message, self.retry_after_s)


@dataclass(eq=False)
class Job:
    """Rows of one request that run together: `velocities` to go, each of `rows_each` rows of networks at most.

    `rows` of a batch; `deadline`: the time when nobody wants them any more.
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
"""Times the usual that a velocity counts at most."""


class Speed:
    """Seconds that a velocity of a batch takes, `fixed + each * rows` of networks, learnt from those that ran.

    The older a batch, the less it counts: a line through batches of many sizes, or through 0 where they are all alike.
    """

    def __init__(self, memory: float = 0.95):
        self._memory = memory
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._line = 0.0, 0.0

    def ran(self, rows: float, seconds: float) -> None:
        """Learn from one velocity of a batch; of one that took far longer than usual, that it took LEAP times as long.

        So one that waited for an expert that died doesn't have requests refused, and a true change is soon learnt.
        """
        if self._n:
            seconds = min(seconds, LEAP * max(self.seconds(rows), self._y / self._n))
        kept = self._memory
        self._n, self._x, self._y = kept * self._n + 1, kept * self._x + rows, kept * self._y + seconds
        self._xx, self._xy = kept * self._xx + rows * rows, kept * self._xy + rows * seconds
        if self._x:
            self._line = self._fitted()

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
"""A job that needs so many times what it has left, alone, is lost, and nobody waits for it."""


SWAPS = 4
"""Swaps for which an engine waits until it computes, at most, where others have work, too."""


@dataclass
class SharedDevice:
    """A device that the jobs of some schedulers wait for; a swap, which takes `swap_s` seconds, lets another's run."""

    schedulers: "list[Scheduler]" = field(default_factory=list)
    swap_s: float = 0.0

    @property
    def jobs(self) -> "list[tuple[Scheduler, Job]]":
        """All jobs, with their schedulers, the earliest deadline first."""
        owned = [(scheduler, job) for scheduler in self.schedulers for job in scheduler.jobs]
        return sorted(owned, key=lambda pair: pair[1].deadline)


class Scheduler:
    """Jobs by their deadlines, the earliest first, as many at a time as can share a batch.

    That is the best order there is as long as all can be met (Liu and Layland 1973), which `admit` sees to. A long job
    has a late deadline, so it never holds up a short one.
    """

    def __init__(
        self, max_rows: int = 32, max_waiting_rows: int = 1024, margin: float = 1.5, device: SharedDevice | None = None
    ):
        """`max_rows` of a batch; `margin`: how much longer than expected a job is taken to need.

        `device`, if others' jobs wait for it, too: then theirs count as well where one is let in.
        """
        self.max_rows, self.max_waiting_rows, self._margin = max_rows, max_waiting_rows, margin
        self.speed = Speed()
        self._jobs: list[Job] = []
        self._device = SharedDevice() if device is None else device
        self._device.schedulers.append(self)

    @property
    def jobs(self) -> Sequence[Job]:
        """All that were let in and aren't dropped, the earliest deadline first."""
        return self._jobs

    @property
    def rows(self) -> int:
        """Rows of all jobs."""
        return sum(job.rows for job in self._jobs)

    def admit(self, job: Job, now: float) -> None:
        """Take in a job. OverloadedError if it, or another because of it, would come too late, or if rows are too many.

        A job alone is taken in any case: it is met as well as can be.
        """
        self._require_time(job, now)
        bisect.insort(self._jobs, job, key=_deadline)

    def _require_time(self, job: Job, now: float) -> None:
        jobs, most = self._device.jobs, self.max_waiting_rows
        if not jobs:
            return
        alone = {owner for owner, _ in jobs} == {self}
        wait_s = self._device.swap_s * (1 if alone else SWAPS)
        rows = sum(other.rows for _, other in jobs)
        if rows + job.rows > most:
            message = f"{rows} images are being made or wait, of {most} at most"
            raise OverloadedError(message, Load(jobs, wait_s).seconds)
        position = bisect.bisect_right(jobs, job.deadline, key=lambda owned: _deadline(owned[1]))
        with_it = Load([*jobs[:position], (self, job)], wait_s)
        late = self._margin * with_it.seconds - (job.deadline - now)
        due = Load(jobs[:position] if position < len(jobs) else (), wait_s)
        for owner, other in jobs[position:]:
            due.add(owner, other)
            with_it.add(owner, other)
            left = other.deadline - now
            # Who is late already is made no later by much.
            if due.seconds <= HOPE * left:
                late = max(late, self._margin * with_it.seconds - left)
        if late > 0:
            raise OverloadedError("more images are asked for than can be made in time", late)

    def batch(self, now: float) -> list[Job]:
        """Jobs whose rows make the next velocity together: none makes one before it late that has hope otherwise."""
        chosen, rows, rows_each, slowest = list[Job](), 0, 0.0, float("inf")
        for job in self._jobs:
            seconds = self.speed.seconds(rows_each + job.rows_each)
            if chosen and (rows + job.rows > self.max_rows or seconds > slowest):
                break  # whoever is smaller and comes later would only hold this one up
            chosen.append(job)
            rows, rows_each = rows + job.rows, rows_each + job.rows_each
            alone, left = self.speed.seconds(job.rows_each), (job.deadline - now) / job.velocities
            if alone <= HOPE * left:
                slowest = min(slowest, max(alone, left / self._margin))
        return chosen

    def late(self, now: float) -> list[Job]:
        """Jobs that nobody wants any more."""
        return self._jobs[: bisect.bisect_right(self._jobs, now, key=_deadline)]

    def drop(self, job: Job) -> None:
        """Forget a job that is done, late or not wanted."""
        self._jobs.remove(job)

    def seconds(self, jobs: "JobSum") -> float:
        """Seconds until all of these are done, in batches that they fill as well as they can."""
        if not jobs.velocities:  # all have had their last, and are about to be dropped
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
    """Jobs of some schedulers, and the `seconds` until all are done: each scheduler's, after it has waited `wait_s`."""

    def __init__(self, jobs: Iterable[tuple[Scheduler, Job]], wait_s: float):
        self._sums: dict[Scheduler, JobSum] = {}
        self._seconds: dict[Scheduler, float] = {}
        self._wait_s = wait_s
        for scheduler, job in jobs:
            self.add(scheduler, job)

    def add(self, scheduler: Scheduler, job: Job) -> None:
        self._sums.setdefault(scheduler, JobSum()).add(job)
        self._seconds.pop(scheduler, None)

    @property
    def seconds(self) -> float:
        for scheduler in self._sums.keys() - self._seconds.keys():
            self._seconds[scheduler] = scheduler.seconds(self._sums[scheduler]) + self._wait_s
        return sum(self._seconds.values())


def _deadline(job: Job) -> float:
    return job.deadline
