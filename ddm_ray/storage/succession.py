"""Succession: which newer attempt of a job has taken an attempt's place, by a request a look and nobody's clock.

A newer attempt takes it by a committed state, since whoever begins next goes on from there; or by steps that it is
seen to do. One that was claimed and then fell silent, or failed, takes nobody's place.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddm_ray.errors import Preempted, Superseded, TrainingError
from ddm_ray.storage.attempts import CLAIM, Attempt, claimed, read_failure
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.job_files import JobFiles
from ddm_ray.storage.job_status import JobStatus
from ddm_ray.storage.launches import Launch, attempts_of, place_of
from ddm_ray.storage.manifest import NAME
from ddm_ray.storage.store import Store

LOOK_SECONDS = 20.0
"""Pause between looks: two of them and a step pass within a minute of waking, or of a network that is back."""

MOST_PATIENCE_S = 600.0
"""Longest that an attempt of slow steps is waited for, to see whether it lives."""


@dataclass(frozen=True)
class Successor:
    """A newer attempt that has taken another's place, the fields of its claim, and the ids of all newer launches.

    `lives`: False if it has failed, or its heartbeat stands still; None while that can't be said yet.
    """

    number: int
    claim: Mapping[str, Any]
    lives: bool | None = None
    launches: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"attempt {self.number}{place_of(self.claim)}"

    def error(self, number: int, launch_id: str | None, step: int | None = None) -> TrainingError:
        """Why attempt `number`, of the launch of this id, ends; after `step` steps, if it took any.

        Superseded; or Preempted by one that has ended, from whose state the next attempt goes on.
        """
        which = f"attempt {number}" if step is None else f"attempt {number} ends after step {step}"
        if self.lives is False:
            return Preempted(f"{which}: {self} has overtaken it and ended; the next attempt goes on from its state")
        trains = " and trains on" if self.lives else ""
        error = Superseded(f"{which}: {self} has overtaken it{trains}", "leave the job to that one")
        error.by_its_own_launch = launch_id in self.launches
        return error


class Succession:
    """The attempts of a job after one of them, as that one sees them from look to look."""

    def __init__(self, attempt: Attempt, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._store, self._job, self._number = attempt.store, attempt.job, attempt.number
        self._newest = attempt.number
        self._beats: dict[int, tuple[Any, float]] = {}  # and when each was first seen
        self._steps: dict[int, Any] = {}

    def look(self) -> Successor | None:
        """The newest attempt that has taken its place; None, at the cost of one HEAD, while there is no newer one."""
        while self._store.exists(f"{self._attempt(self._newest + 1).prefix}/{CLAIM}"):
            self._newest += 1
        for number in range(self._newest, self._number, -1):
            overtakes, lives = self._judge(self._attempt(number))
            if overtakes:
                claims = {newer: self._attempt(newer).claim() for newer in range(self._number + 1, self._newest + 1)}
                launches = {str(claim["launch"]) for claim in claims.values() if claim.get("launch")}
                return Successor(number, claims[number], lives, frozenset(launches))
        return None

    def _attempt(self, number: int) -> Attempt:
        return Attempt(self._store, self._job, number)

    def _judge(self, attempt: Attempt) -> tuple[bool, bool | None]:
        """True if it has taken the place, by a committed state or by steps since the last look; and if it lives.

        A heartbeat beats by itself while nothing is trained yet: without a state only steps count.
        """
        number, sizes = attempt.number, self._store.sizes(attempt.prefix)
        files = JobFiles(Artifact(self._job), {f"attempts/{number:04d}/{name}": size for name, size in sizes.items()})
        saved = files.saved > (0, 0)
        if files.failed(number):
            return saved, False
        fields = attempt.last_beat()
        if saved and self._store.exists(f"{self._job}/{NAME}"):
            return True, True  # the job is done
        lives = self._lives(number, fields)
        trained, step = self._steps.get(number), fields.get("step") if fields.get("phase") == "training" else None
        if step is not None:
            self._steps[number] = step
        return saved or (None not in (trained, step) and trained != step), lives

    def _lives(self, number: int, heartbeat: dict[str, Any]) -> bool | None:
        """True if it has moved since the last look; False if not for longer than three of its beats and steps."""
        beat, now = heartbeat.get("beat"), self._clock()
        seen, (before, since) = number in self._beats, self._beats.get(number, (beat, now))
        if not seen or before != beat:
            self._beats[number] = beat, now
            return True if seen else None
        patience = JobStatus(number, heartbeat, None, None, 0).patience(0.0)
        return False if now - since >= min(patience, MOST_PATIENCE_S) else None


def require_standing(
    store: Store,
    launch: Launch,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Raise why a launch begins no further attempt: it has given up, or another's took the place of its newest one.

    A launch without an attempt of its own has just begun, and is about to overtake. One whose successor has ended goes
    on from that one's state; to see that may take some LOOK_SECONDS.
    """
    job = launch.artifact
    if note := read_failure(store, launch.given_up_key):
        raise TrainingError.from_fields(note)
    attempts = [Attempt(store, job, number) for number in claimed(store, job) if number > launch.after]
    own = attempts_of(launch.id, {attempt.number: attempt.claim() for attempt in attempts})
    if not own or own[-1] == attempts[-1].number:
        return
    succession = Succession(Attempt(store, job, own[-1]), clock)
    while (successor := succession.look()) and successor.lives is None:
        sleep(LOOK_SECONDS)
    if successor and successor.lives is not False:
        raise successor.error(own[-1], launch.id)
