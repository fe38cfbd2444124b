"""Living launches: the commands that train an artifact now."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ddm_ray.errors import Left, Stopped
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.jobs.job_files import JobFiles, list_jobs
from ddm_ray.jobs.job_status import lease_of
from ddm_ray.jobs.judge import Sightings
from ddm_ray.jobs.launches import Launch, has_given_up, lives, place_of
from ddm_ray.run.graph import Artifact
from ddm_ray.store.store import Store

LOOK_SECONDS, LEAST_SECONDS = 0.5, 3.0
"""Pause between two looks at the heartbeats of attempts on other machines, and shortest time of looking."""


@dataclass(frozen=True)
class LivingLaunch:
    """A launch that trains `artifact`, its `place` in words, and its newest `attempt`, or None before the first one."""

    artifact: Artifact
    place: str
    attempt: Attempt | None


def living_launches(
    store: Store,
    artifacts: Iterable[Artifact],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    here_alone: bool = False,
) -> list[LivingLaunch]:
    """The living launches of these artifacts, but those of this process. `here_alone`: those on this machine.

    A launch on this machine lives as long as its process does. Elsewhere it lives if the heartbeat of its attempt
    changes. This function waits for that as long as the attempt's lease, mostly 3 to 15 seconds.
    """
    here, elsewhere = list[LivingLaunch](), list[LivingLaunch]()
    for files in list_jobs(store, artifacts).values():
        if not files.committed:
            for launch, alive in _possible(store, files):
                if alive or launch.attempt:
                    (here if alive else elsewhere).append(launch)
    return here if here_alone else here + _beating(elsewhere, clock, sleep)


def _possible(store: Store, files: JobFiles) -> Iterator[tuple[LivingLaunch, bool]]:
    """The launches that may live: that of the newest attempt, and those after it; each with True if it surely lives."""
    newest = max(files.attempts, default=0)
    attempt = Attempt(store, files.artifact, newest)
    claim = attempt.claim() if newest else {}
    own = claim.get("launch")
    if newest and own is None and not files.failed(newest):  # trained in a process without a launch
        yield LivingLaunch(files.artifact, place_of(claim).removeprefix(" on "), attempt), False
    for launch_id, after in sorted(files.begun):
        launch = Launch(files.artifact, launch_id, after=after)
        has_attempt = launch_id == own
        if not has_attempt and after != newest:
            continue
        if has_given_up(files, launch_id) or (has_attempt and files.failed(newest) and _is_over(attempt)):
            continue
        record = launch.begun(store)
        alive = lives(record)
        if alive is False or (alive and record["pid"] == os.getpid()):
            continue
        place = f"process {record['pid']} on this machine" if alive else place_of(record).removeprefix(" on ")
        yield LivingLaunch(files.artifact, place, attempt if has_attempt else None), bool(alive)


def _is_over(attempt: Attempt) -> bool:
    """True if no attempt of the same launch follows this one, which has noted why it ended."""
    failure = attempt.failure()
    return failure is not None and (failure["final"] or failure["kind"] in (Stopped.__name__, Left.__name__))


def _beating(
    suspects: list[LivingLaunch], clock: Callable[[], float], sleep: Callable[[float], None]
) -> list[LivingLaunch]:
    """The launches among these with an attempt that beats within its lease."""
    seen, beating = Sightings(), list[LivingLaunch]()
    while suspects:
        for launch in list(suspects):
            assert launch.attempt
            name, fields = launch.attempt.prefix, launch.attempt.last_beat()
            silence = seen.see(name, fields.get("beat"), clock())
            if seen.changed(name):
                beating.append(launch)
            if seen.changed(name) or silence > lease_of(fields, LEAST_SECONDS):
                suspects.remove(launch)
        if suspects:
            sleep(LOOK_SECONDS)
    return beating
