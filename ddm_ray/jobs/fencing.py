"""Fencing: an attempt ends once a newer one has superseded it. Each look costs one request while there is no newer one.

A newer attempt supersedes an older one by a committed state, since the next attempt continues from there, or by steps
that the older one sees it do. A newer attempt that fell silent or failed before that supersedes nothing.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddm_ray.errors import Overtaken, Superseded, TrainingError
from ddm_ray.jobs.attempts import CLAIM, Attempt, claimed, read_failure
from ddm_ray.jobs.job_files import JobFiles
from ddm_ray.jobs.job_status import lease_of
from ddm_ray.jobs.judge import Lease, Sightings, has_overtaken, judge
from ddm_ray.jobs.launches import Launch, attempts_of, place_of
from ddm_ray.run.graph import Artifact
from ddm_ray.run.manifest import NAME
from ddm_ray.store.store import Store

LOOK_SECONDS = 20.0
"""Pause between looks. Two looks and a step take less than a minute after a machine wakes or its network is back."""


@dataclass(frozen=True)
class NewerAttempt:
    """A newer attempt that has superseded another, the fields of its claim, and the ids of all newer launches.

    `lives`: False if it has ended or its lease has expired; None while that isn't known yet.
    """

    number: int
    claim: Mapping[str, Any]
    lives: bool | None = None
    launches: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"attempt {self.number}{place_of(self.claim)}"

    def error(self, number: int, launch_id: str | None, step: int | None = None) -> TrainingError:
        """Why attempt `number`, of the launch of this id, ends; after `step` steps, if it took any.

        The error is Superseded, or Overtaken if the newer attempt has ended; the next one continues from its state.
        """
        which = f"attempt {number}" if step is None else f"attempt {number} ends after step {step}"
        if self.lives is False:
            return Overtaken(f"{which}: {self} has overtaken it and ended; the next attempt goes on from its state")
        trains = " and trains on" if self.lives else ""
        error = Superseded(f"{which}: {self} has overtaken it{trains}", "leave the job to that one")
        error.by_its_own_launch = launch_id in self.launches
        return error


class Fence:
    """Watches for newer attempts of a job on behalf of one attempt."""

    def __init__(self, attempt: Attempt, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._store, self._job, self._number = attempt.store, attempt.job, attempt.number
        self._newest, self._seen = attempt.number, Sightings()

    def look(self) -> NewerAttempt | None:
        """The newest attempt that has superseded this one, or None. Costs one HEAD while there is no newer one."""
        while self._store.exists(f"{self._attempt(self._newest + 1).prefix}/{CLAIM}"):
            self._newest += 1
        newer = range(self._newest, self._number, -1)
        leases = [self._lease(self._attempt(number)) for number in newer]
        verdicts = judge(self._job, leases, self._seen, self._clock())
        for lease in leases:
            if has_overtaken(self._job, lease, self._seen):
                claims = {number: self._attempt(number).claim() for number in newer}
                launches = {str(claim["launch"]) for claim in claims.values() if claim.get("launch")}
                done = self._store.exists(f"{self._job}/{NAME}")
                lives = True if done else {"alive": True, "silent": None, "dead": False}[verdicts[lease.number]]
                return NewerAttempt(lease.number, claims[lease.number], lives, frozenset(launches))
        return None

    def _attempt(self, number: int) -> Attempt:
        return Attempt(self._store, self._job, number)

    def _lease(self, attempt: Attempt) -> Lease:
        number, sizes = attempt.number, self._store.sizes(attempt.prefix)
        files = JobFiles(Artifact(self._job), {f"attempts/{number:04d}/{name}": size for name, size in sizes.items()})
        saved = files.saved > (0, 0)
        if files.failed(number):
            return Lease(number, None, 0.0, saved=saved, ended=True)
        fields = attempt.last_beat()
        step = fields.get("step") if fields.get("phase") == "training" else None
        return Lease(number, fields.get("beat"), lease_of(fields, 0.0), step, saved)


def require_standing(
    store: Store,
    launch: Launch,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Raise an error if a launch must begin no further attempt: it has given up, or its newest attempt is superseded.

    A launch without an attempt of its own has just begun, and may overtake others. If the newer attempt has ended, the
    launch continues from its state; to see that may take some LOOK_SECONDS.
    """
    job = launch.artifact
    if note := read_failure(store, launch.given_up_key):
        raise TrainingError.from_fields(note)
    attempts = [Attempt(store, job, number) for number in claimed(store, job) if number > launch.after]
    own = attempts_of(launch.id, {attempt.number: attempt.claim() for attempt in attempts})
    if not own or own[-1] == attempts[-1].number:
        return
    fence = Fence(Attempt(store, job, own[-1]), clock)
    while (newer := fence.look()) and newer.lives is None:
        sleep(LOOK_SECONDS)
    if newer and newer.lives is not False:
        raise newer.error(own[-1], launch.id)
