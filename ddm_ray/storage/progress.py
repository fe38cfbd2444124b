"""How far a training job is, read from what its attempts left on storage: heartbeats, failures, milestones, states."""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ddm_ray.errors import Preempted
from ddm_ray.storage.attempts import FAILED, Attempt, heartbeat
from ddm_ray.storage.manifest import NAME
from ddm_ray.storage.store import Store

_COMMITTED = re.compile(rf"(?P<attempt>\d+)/(?P<kind>weights|state)/step-(?P<step>\d+)/{re.escape(NAME)}")


@dataclass(frozen=True)
class Progress:
    """A job that has been begun. `attempt` is its newest; `told` the last heartbeat, with the `attempt` it is of.

    `milestone` and `saved`: steps of the furthest published weights (None: none) and of the state that the next
    attempt goes on from (0: none). `silent_seconds` since the newest attempt's last sign, None where that is gone.
    """

    attempt: int
    told: dict[str, Any]
    failure: dict[str, Any] | None
    milestone: int | None
    saved: int
    silent_seconds: float | None

    @property
    def spoke(self) -> bool:
        """Whether the newest attempt has told anything yet."""
        return self.told.get("attempt") == self.attempt

    @property
    def beat(self) -> int | None:
        """The counter of the newest attempt's heartbeat; None before its first."""
        return self.told.get("beat") if self.spoke else None

    @property
    def phase(self) -> str:
        """What the newest attempt does: starting, fitting (rows into memory), training, publishing or leaving."""
        if self.left:
            return "leaving"
        return self.told.get("phase", "training") if self.spoke else "starting"

    @property
    def left(self) -> bool:
        """Whether the newest attempt ended because it was asked to, with nothing lost: another one is to follow."""
        return self.failure is not None and self.failure["kind"] == Preempted.__name__

    @property
    def step(self) -> int:
        """Steps done, as the newest attempt told; what it goes on from before it does."""
        return self.told.get("step", self.saved) if self.spoke else self.saved

    @property
    def steps(self) -> int | None:
        """Steps wanted; None where nobody has told yet."""
        return self.told.get("steps")

    def patience(self, seconds: float) -> float:
        """How long its silence means nothing: so long, or three of its own steps, between which it tells nothing."""
        rate = self.value("steps_per_second")
        return max(seconds, 3 / rate) if rate and rate > 0 else seconds

    def value(self, name: str) -> float | None:
        """A number of the newest attempt's heartbeat (loss, mfu, world_size ...); None if it didn't tell any."""
        found = self.told.get(name) if self.spoke else None
        return found if isinstance(found, int | float) else None


def progress(store: Store, job: str) -> Progress | None:
    """How far the job is; None if nobody has begun it. Raises CorruptArtifact for a damaged heartbeat."""
    keys = _keys(store, job)
    newest = _newest(keys)
    if newest is None:
        return None
    told = heartbeat(store, job) or {}
    newest = max(newest, told.get("attempt", 0))  # one that was claimed meanwhile
    sign = "HEARTBEAT" if told.get("attempt") == newest else "CLAIM"
    try:
        silent = max(0.0, time.time() - store.modified(f"{job}/attempts/{newest:04d}/{sign}"))
    except FileNotFoundError:
        silent = None
    published = [step for _, step, _ in _committed(keys, "weights")]
    states = [(attempt, step) for attempt, step, _ in _committed(keys, "state")]
    return Progress(
        attempt=newest,
        told=told,
        failure=_failure(store, job, keys),
        milestone=max(published, default=None),
        saved=max(states, default=(0, 0))[1],
        silent_seconds=silent,
    )


def _keys(store: Store, job: str) -> list[str]:
    # One listing tells everything but what heartbeat and failure say: a survey of many jobs costs few requests.
    return list(store.sizes(f"{job}/attempts"))


def _newest(keys: Iterable[str]) -> int | None:
    return max((int(number) for key in keys if (number := key.split("/")[0]).isdecimal()), default=None)


def _committed(keys: Iterable[str], kind: str) -> list[tuple[int, int, str]]:
    """(attempt, step, key of the manifest) of all that is committed of a kind."""
    found = [match for key in keys if (match := _COMMITTED.fullmatch(key)) and match["kind"] == kind]
    return [(int(match["attempt"]), int(match["step"]), match[0]) for match in found]


def _failure(store: Store, job: str, keys: list[str]) -> dict[str, Any] | None:
    newest = _newest(keys)
    if newest is None:
        return None
    attempt = Attempt(store, job, newest)
    said = attempt.failure() if f"{newest:04d}/{FAILED}" in keys else None
    if said and str(attempt.claim().get("launch")).removeprefix(f"{job}/attempts/") in keys:
        said |= {"error": f"{said['error']}; given up", "final": True}
    return {**said, "attempt": newest} if said else None
