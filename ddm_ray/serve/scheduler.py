"""Requests in order of their deadlines: which of them run next, and which can't be met and are refused at once.

A plain class without a model, a thread or a clock: times are seconds on whichever clock its caller reads.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from ddm_ray.errors import ServeError


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


class Speed:
    """Seconds that a velocity of a batch takes, `fixed + each * rows` of networks, learnt from those that ran.

    The older a batch, the less it counts: a line through batches of many sizes, or through 0 where they are all alike.
    """

    def __init__(self, memory: float = 0.95):
        self._memory = memory
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def ran(self, rows: float, seconds: float) -> None:
        """Learn from one velocity of a batch."""
        kept = self._memory
        self._n, self._x, self._y = kept * self._n + 1, kept * self._x + rows, kept * self._y + seconds
        self._xx, self._xy = kept * self._xx + rows * rows, kept * self._xy + rows * seconds

    def seconds(self, rows: float) -> float:
        """Seconds that a velocity of so many rows of networks takes; 0 before any ran."""
        if self._x == 0:
            return 0.0
        through_origin = self._y / self._x
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-6 * self._x * self._x:
            return rows * through_origin
        each = (self._n * self._xy - self._x * self._y) / spread
        fixed = (self._y - each * self._x) / self._n
        return rows * through_origin if each < 0 or fixed < 0 else fixed + each * rows


HOPE = 1.2
"""A job that needs so many times what it has left, alone, is lost, and nobody waits for it."""


class Scheduler:
    """Jobs by their deadlines, the earliest first, as many at a time as can share a batch.

    That is the best order there is as long as all can be met (Liu and Layland 1973), which `admit` sees to. A long job
    has a late deadline, so it never holds up a short one.
    """

    def __init__(self, max_rows: int = 32, max_waiting_rows: int = 1024, margin: float = 1.5):
        """`max_rows` of a batch; `margin`: how much longer than expected a job is taken to need."""
        self.max_rows, self.max_waiting_rows, self._margin = max_rows, max_waiting_rows, margin
        self.speed = Speed()
        self._jobs: list[Job] = []

    @property
    def rows(self) -> int:
        """Rows of all jobs."""
        return sum(job.rows for job in self._jobs)

    def admit(self, job: Job, now: float) -> None:
        """Take in a job. OverloadedError if it, or another because of it, would come too late, or if rows are too many.

        A job alone is taken in any case: it is met as well as can be.
        """
        if self._jobs:
            self._require_time(job, now)
        bisect.insort(self._jobs, job, key=_deadline)

    def _require_time(self, job: Job, now: float) -> None:
        rows, most = self.rows, self.max_waiting_rows
        if rows + job.rows > most:
            raise OverloadedError(f"{rows} images are being made or wait, of {most} at most", self._seconds(self._jobs))
        position = bisect.bisect_right(self._jobs, job.deadline, key=_deadline)
        due = _Sum(self._jobs[:position])
        with_it = _Sum([*self._jobs[:position], job])
        late = self._margin * self._needed(with_it) - (job.deadline - now)
        for other in self._jobs[position:]:
            due.add(other)
            with_it.add(other)
            left = other.deadline - now
            # Who is late already is made no later by much.
            if self._margin * self._needed(due) <= left:
                late = max(late, self._margin * self._needed(with_it) - left)
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

    def _seconds(self, jobs: Sequence[Job]) -> float:
        return self._needed(_Sum(jobs))

    def _needed(self, jobs: "_Sum") -> float:
        """Seconds until all these are done, in batches that they fill."""
        together = jobs.rows_each * min(1.0, self.max_rows / jobs.rows)
        return jobs.work / together * self.speed.seconds(together)


class _Sum:
    """Work, rows and rows of networks a velocity of some jobs."""

    def __init__(self, jobs: Sequence[Job]):
        self.work, self.rows, self.rows_each = 0.0, 0, 0.0
        for job in jobs:
            self.add(job)

    def add(self, job: Job) -> None:
        self.work += job.work
        self.rows += job.rows
        self.rows_each += job.rows_each


def _deadline(job: Job) -> float:
    return job.deadline
