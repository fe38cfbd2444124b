"""The choice of a worker: which unfinished job of a run it takes, if any. Pure: no storage, no clock, no Ray.

A worker takes a free job, the most work first. If nothing is free, it takes a job over from a worker that would need
`SOONER` times as long. So a job never waits for a faster worker, and a slow, frozen or crowded holder doesn't keep the
last job. Over 40 simulated loads per spread of speeds, with up to 40 islands, the makespan is on average 1.01, 1.02,
1.02 and 1.03 times the lower bound, for speeds from 1 to 1, 4, 8 and 16 (benchmarks/RESULTS.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median_low

from ddm_ray.run.graph import Artifact

SOONER = 1.3
"""A job is taken over if its holder would need at least this many times as long as this worker."""
MOVE_SECONDS = 60.0
"""Cost of a take-over: the holder saves a state and ends, and the job starts on another island."""
_SPEEDS, _WORKS = (1e-6, 1e30), (1e-6, 1e40)
"""Valid ranges of speeds (FLOP/s) and work (FLOP). They are read from storage; values outside, and NaN, are ignored."""
_MAX_LINES = 4


@dataclass(frozen=True)
class OpenJob:
    """An unfinished training job, as seen on storage.

    `work`: FLOP left. `holder`: id of the worker that holds it, or words on an attempt of a command; empty if it has
    none. `seconds_left`: time that the holder still needs at its present speed, or None. `obstacle`: why the job can't
    be taken now; empty if it can.
    """

    artifact: Artifact
    work: float
    holder: str = ""
    seconds_left: float | None = None
    obstacle: str = ""

    @property
    def free(self) -> bool:
        """True if the job may be taken now."""
        return not self.holder and not self.obstacle


@dataclass(frozen=True)
class Worker:
    """A living worker: its id ISLAND/NUMBER and its `speed` in FLOP/s, None if that isn't known yet."""

    id: str
    speed: float | None


@dataclass(frozen=True)
class Choice:
    """The job that a worker takes now, from its holder if it has one; or None and the `reason` for waiting."""

    take: OpenJob | None
    reason: str = ""


def choose(jobs: Sequence[OpenJob], workers: Sequence[Worker], me: str, barred: frozenset[Artifact]) -> Choice:
    """The choice of worker `me`, which may take none of `barred`. The order of jobs and workers doesn't matter.

    An unknown or invalid speed counts as the median of the others, or as 1 if none is known. An attempt of a command,
    which no worker holds, is never taken over. Raises ValueError if `me` isn't one of the workers.
    """
    speeds = _speeds(workers)
    if me not in speeds:
        raise ValueError(f"{me} is none of the workers that it has to choose among")
    queue = _by_work(jobs)
    for job in queue:
        if job.free and job.artifact not in barred:
            return Choice(job)
    others = speeds.keys() - {me}
    held = [job for job in queue if job.holder in others and not job.obstacle and job.artifact not in barred]
    remaining = {job.artifact: _remaining(job, speeds[job.holder]) for job in held}
    slower = [
        job
        for job in held
        if remaining[job.artifact] > SOONER * (MOVE_SECONDS + remaining[job.artifact] * speeds[job.holder] / speeds[me])
    ]
    if slower:
        return Choice(max(slower, key=lambda job: remaining[job.artifact]))
    reasons = [_reason(job) for job in queue if not job.free or job.artifact in barred]
    more = [f"and {len(reasons) - _MAX_LINES} more"] if len(reasons) > _MAX_LINES else []
    return Choice(None, "; ".join([*reasons[:_MAX_LINES], *more]) or "there is nothing to take")


def _speeds(workers: Sequence[Worker]) -> dict[str, float]:
    """FLOP/s of each worker by its id."""
    ids = sorted({worker.id: worker.speed for worker in workers}.items())
    return dict(zip((name for name, _ in ids), _completed([speed for _, speed in ids], *_SPEEDS), strict=True))


def _by_work(jobs: Sequence[OpenJob]) -> list[OpenJob]:
    works = _completed([job.work for job in jobs], *_WORKS)
    pairs = sorted(zip(works, jobs, strict=True), key=lambda pair: (-pair[0], pair[1].artifact))
    return [job for _, job in pairs]


def _completed(values: Sequence[float | None], least: float, most: float) -> list[float]:
    """The values; one outside the limits is replaced by the lower median of those inside, or by 1 if there are none."""
    known = [value for value in values if value is not None and least <= value <= most]
    usual = median_low(known) if known else 1.0
    return [value if value is not None and least <= value <= most else usual for value in values]


def _remaining(job: OpenJob, speed: float) -> float:
    """Seconds that the holder still needs at this speed; 0 if the job's work isn't known."""
    if job.seconds_left is not None and 0 <= job.seconds_left < inf:
        return job.seconds_left
    return job.work / speed if _WORKS[0] <= job.work <= _WORKS[1] else 0.0


def _reason(job: OpenJob) -> str:
    if job.free:
        return f"{job.artifact} is left to others"
    if job.obstacle:
        return f"{job.artifact}: {job.obstacle}"
    return f"{job.artifact} is trained by {job.holder}"
