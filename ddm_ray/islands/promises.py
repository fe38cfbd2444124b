"""Promises of a plan: the workers that it counts on, and when they are late, as one observer's own clock has it.

Every worker leaves jobs to others that would finish them sooner. One that is there and never takes its own (its view
differs, its training hangs, it lies about its speed) would hold up all who wait for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ddm_ray.islands.choose import Choice, OpenJob, Worker, choose
from ddm_ray.storage.graph import Artifact

_PATIENCE = 2.0


@dataclass(frozen=True)
class _Promise:
    """A job that a worker is to take until `due`, and what it trained when that was first expected."""

    artifact: Artifact
    held: str
    due: float


class Promises:
    """Chooses for one worker, without those who are late.

    Late is who hasn't taken what the plan gave it after twice the time that it was to take, and `grace` seconds. It is
    so until it takes something, or the job that it left is no longer free. Pure: readings of the observer's own clock
    are brought.
    """

    def __init__(self, grace: float):
        self._grace = grace
        self._made: dict[str, _Promise] = {}

    def choose(self, jobs: Sequence[OpenJob], workers: Sequence[Worker], me: str, now: float) -> Choice:
        """The choice of worker `me` at `now`, seconds. Raises ValueError if it is none of the workers."""
        held = {job.owner: job.artifact for job in jobs if job.owner}
        free = {job.artifact for job in jobs if job.free}
        self._made = {
            worker: promise
            for worker, promise in self._made.items()
            if promise.artifact in free and promise.held == held.get(worker, "")
        }
        late = {worker for worker, promise in self._made.items() if now > promise.due}
        choice = choose(jobs, [worker for worker in workers if worker.id not in late], me)
        for worker, (artifact, seconds) in choice.expects.items():
            due = now + _PATIENCE * seconds + self._grace
            self._made.setdefault(worker, _Promise(artifact, held.get(worker, ""), due))
        return choice
