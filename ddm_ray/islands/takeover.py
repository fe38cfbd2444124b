"""A take-over: the worker that has taken a job asks earlier launches to end, and waits for the living attempt."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from ddm_ray.islands.choose import OpenJob
from ddm_ray.islands.worker_heartbeat import LEASE_SECONDS
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.jobs.job_files import list_jobs
from ddm_ray.jobs.job_status import START_SECONDS
from ddm_ray.jobs.judge import Sightings
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.stops import ask, launch_stop_key
from ddm_ray.run.run import Run

_LAUNCH = re.compile(r"[0-9a-f]{1,40}")


class TakeOver:
    """Asks the launches of a job to end that may have or begin an attempt, for the worker of this id.

    `before`: the note of the take before its own, empty if there is none. A living attempt saves its state first.
    """

    def __init__(
        self,
        run: Run,
        job: OpenJob,
        worker_id: str,
        before: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run, self._job, self._clock = run, job, clock
        self._attempt: Attempt | None = None
        self._seen, self._began = Sightings(), clock()
        files = list_jobs(run.store, [job.artifact])[job.artifact]
        newest = max(files.attempts, default=0)
        attempt = Attempt(run.store, job.artifact, newest)
        # All of them: which one began last only their clocks could tell.
        launches = {*files.launched_after(newest), *files.launches & {str(attempt.claim().get("launch"))}}
        # It may still wait for a launch that it has taken the job from.
        launches |= {launch_id for launch_id in [before.get("launch", "")] if _LAUNCH.fullmatch(launch_id)}
        for launch_id in launches:
            ask(run.store, launch_stop_key(Launch(job.artifact, launch_id)), f"taken over by worker {worker_id}")
        if job.holder and newest:  # a job without a holder has an expired lease
            self._attempt = attempt

    @property
    def done(self) -> bool:
        """True once the attempt has ended, its lease has expired, or START_SECONDS have passed."""
        if (attempt := self._attempt) is None:
            return True
        now = self._clock()
        silence = self._seen.see(attempt.prefix, attempt.last_beat().get("beat"), now)
        expired = silence > LEASE_SECONDS or now - self._began > START_SECONDS
        return expired or attempt.failure() is not None or self._run.finished(self._job.artifact) is not None
