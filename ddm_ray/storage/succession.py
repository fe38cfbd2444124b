"""Succession: which newer attempt of a job has taken an attempt's place, by a request a look and nobody's clock.

A newer attempt takes it by a committed state, since whoever begins next goes on from there; or by being seen alive. One
that was claimed and then fell silent, or failed, takes nobody's place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddm_ray.errors import CorruptArtifact, Superseded, TrainingError
from ddm_ray.storage.attempts import CLAIM, Attempt, claimed, read_failure
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.job_files import JobFiles
from ddm_ray.storage.launches import Launch, attempts_of, place_of
from ddm_ray.storage.store import Store


@dataclass(frozen=True)
class Successor:
    """A newer attempt that has taken another's place, and the fields of its claim."""

    number: int
    claim: Mapping[str, Any]

    def __str__(self) -> str:
        return f"attempt {self.number}{place_of(self.claim)}"

    def error(self, number: int, launch_id: str | None, step: int | None = None) -> Superseded:
        """Why attempt `number`, of the launch of this id, ends; after `step` steps, if it took any."""
        which = f"attempt {number}" if step is None else f"attempt {number} ends after step {step}"
        error = Superseded(f"{which}: {self} has overtaken it and trains on", "leave the job to that one")
        error.by_its_own_launch = launch_id is not None and self.claim.get("launch") == launch_id
        return error


class Succession:
    """The attempts of a job after one of them, as that one sees them from look to look."""

    def __init__(self, attempt: Attempt):
        self._store, self._job, self._number = attempt.store, attempt.job, attempt.number
        self._newest = attempt.number
        self._beats: dict[int, int | None] = {}

    def look(self) -> Successor | None:
        """The newest attempt that has taken its place; None, at the cost of one HEAD, while there is no newer one."""
        while self._store.exists(f"{self._attempt(self._newest + 1).prefix}/{CLAIM}"):
            self._newest += 1
        for number in range(self._newest, self._number, -1):
            if self._goes_on(attempt := self._attempt(number)):
                return Successor(number, attempt.claim())
        return None

    def _attempt(self, number: int) -> Attempt:
        return Attempt(self._store, self._job, number)

    def _goes_on(self, attempt: Attempt) -> bool:
        """True if it has committed a state, or its heartbeat's counter has changed since the last look."""
        number, sizes = attempt.number, self._store.sizes(attempt.prefix)
        files = JobFiles(Artifact(self._job), {f"attempts/{number:04d}/{name}": size for name, size in sizes.items()})
        if files.saved > (0, 0):
            return True
        if files.failed(number):
            return False
        try:
            beat = attempt.last_beat().get("beat")
        except CorruptArtifact:
            return False
        before, self._beats[number] = self._beats.get(number), beat
        return None not in (before, beat) and before != beat


def require_standing(store: Store, launch: Launch) -> None:
    """Raise why a launch begins no further attempt: it has given up, or another's took the place of its newest one.

    A launch without an attempt of its own has just begun, and is about to overtake.
    """
    job = launch.artifact
    if note := read_failure(store, launch.given_up_key):
        raise TrainingError.from_fields(note)
    attempts = [Attempt(store, job, number) for number in claimed(store, job) if number > launch.after]
    own = attempts_of(launch.id, {attempt.number: attempt.claim() for attempt in attempts})
    if own and own[-1] != attempts[-1].number and (successor := Succession(Attempt(store, job, own[-1])).look()):
        raise successor.error(own[-1], launch.id)
