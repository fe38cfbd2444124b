"""A take-over of a job: earlier launches are asked to end, and the living attempt is waited for."""

import re
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ddm_ray.islands.worker_heartbeat import LEASE_SECONDS
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.jobs.job_files import list_jobs
from ddm_ray.jobs.job_status import START_SECONDS
from ddm_ray.jobs.judge import Sightings
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.stops import ask, launch_stop_key
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run

_LAUNCH = re.compile(r"[0-9a-f]{1,40}")


class TakeOver:
    """Asks the launches of an artifact to end that may have or begin an attempt. A living one saves its state first.

    `taker`: words on what takes over. `lives`: the newest attempt may live, so that it is waited for. `before`: the
    note of the take before its own by an island's worker, empty if there is none.
    """

    def __init__(
        self,
        run: Run,
        artifact: Artifact,
        taker: str,
        lives: bool,
        before: Mapping[str, Any] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run, self._artifact, self._clock = run, artifact, clock
        self._attempt: Attempt | None = None
        self._seen, self._began = Sightings(), clock()
        files = list_jobs(run.store, [artifact])[artifact]
        newest = max(files.attempts, default=0)
        attempt = Attempt(run.store, artifact, newest)
        # All of them: which one began last only their clocks could tell.
        launches = {*files.launched_after(newest), *files.launches & {str(attempt.claim().get("launch"))}}
        # It may still wait for a launch that it has taken the job from.
        launches |= {launch_id for launch_id in [before.get("launch", "")] if _LAUNCH.fullmatch(launch_id)}
        for launch_id in launches:
            ask(run.store, launch_stop_key(Launch(artifact, launch_id)), f"taken over by {taker}")
        if lives and newest:
            self._attempt = attempt

    @property
    def done(self) -> bool:
        """True once the attempt has ended, its lease has expired, or START_SECONDS have passed."""
        if (attempt := self._attempt) is None:
            return True
        now = self._clock()
        silence = self._seen.see(attempt.prefix, attempt.last_beat().get("beat"), now)
        expired = silence > LEASE_SECONDS or now - self._began > START_SECONDS
        return expired or attempt.failure() is not None or self._run.finished(self._artifact) is not None
