"""Elders: older attempts that train on beside a newer one. Who launches a job twice mustn't be told that it is dead."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ddm_ray.storage.attempts import Attempt
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.job_status import JobStatus
from ddm_ray.storage.pulse import Pulses
from ddm_ray.storage.status import REQUESTS, Status
from ddm_ray.storage.store import Store

MOST_ELDERS = 8
"""Older attempts of a job that are asked for at most: whatever kills each at once may leave hundreds."""


class Elders:
    """The older attempts of many jobs, as one observer sees them.

    They are read, mostly by one request a job, while it has seen no sign of life of the newest.
    """

    def __init__(self, store: Store):
        self._store = store
        self._pulses: dict[tuple[Artifact, int], Pulses] = {}  # by the newest attempt: after another all begins anew

    def look(self, statuses: Sequence[Status], newest: Pulses, now: float) -> list[Status]:
        """The observed statuses, with an older attempt in place of a newest one that gives no sign of life.

        Only one whose counter changes in sight of the observer, whose pulses of the `newest` attempts these are. That
        of an attempt that died stands still, as after each restart.
        """
        doubted = {status.artifact: _key(status) for status in statuses if _doubted(status, newest)}
        self._pulses = {key: self._pulses.get(key) or Pulses() for key in doubted.values()}
        if not doubted:
            return list(statuses)

        def judge(status: Status) -> Status:
            return self._judge(status, now) if status.artifact in doubted else status

        with ThreadPoolExecutor(REQUESTS) as pool:
            return list(pool.map(judge, statuses))

    def _judge(self, status: Status, now: float) -> Status:
        """The status by an older attempt that has moved; else with those of which that can't be said yet."""
        job, pulses = status.job, self._pulses[_key(status)]
        assert job and job.files
        moved: list[Status] = []
        undecided: list[int] = []
        for number in sorted(job.files.elders[:MOST_ELDERS], key=lambda number: not pulses.moved(str(number))):
            heartbeat = self._heartbeat(status, number)
            if not heartbeat:
                continue
            elder = JobStatus(number, heartbeat, None, job.milestone, job.saved, beside=job, files=job.files)
            silent_seconds = pulses.take(str(number), number, elder.beat, now)
            older = replace(status, state="begun", job=elder, silent_seconds=silent_seconds)
            if pulses.moved(str(number)):
                moved.append(older)
                if not older.silent:
                    break
            elif not older.silent:
                undecided.append(number)
        if moved and (status.state == "failed" or status.silent or job.left or not job.beats):
            return min(moved, key=lambda older: older.silent_seconds or 0.0)
        return replace(status, elders=tuple(undecided))

    def _heartbeat(self, status: Status, number: int) -> dict[str, Any]:
        """The attempt's heartbeat; empty if it is gone or can't be read."""
        job = status.job
        assert job
        if status.state == "begun" and job.heartbeat.get("attempt") == number:
            return job.heartbeat  # the last one that the job has: read for this very look
        return Attempt(self._store, status.artifact, number).last_beat()


def _doubted(status: Status, newest: Pulses) -> bool:
    """True if an older attempt may train, and the newest gives no sign of life."""
    job = status.job
    if job is None or job.files is None or status.state not in ("begun", "failed"):
        return False
    lives = status.state == "begun" and newest.moved(status.artifact) and not status.silent and not job.left
    return not lives and bool(job.files.elders)


def _key(status: Status) -> tuple[Artifact, int]:
    assert status.job
    return status.artifact, status.job.attempt
