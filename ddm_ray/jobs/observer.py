"""Observers look at a run repeatedly and so see which attempts live. What rarely changes is rarely read."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from ddm_ray.jobs.attempts import Attempt
from ddm_ray.jobs.job_status import JobStatus
from ddm_ray.jobs.judge import Sightings, judge, sight_of
from ddm_ray.jobs.status import REQUESTS, Status, reread, survey
from ddm_ray.run.run import Run

LIST_SECONDS = 60.0
"""Longest time between two listings. A listing costs as much as a dozen reads per thousand files."""
LOOK_SECONDS, MAX_PAUSE_SECONDS = 0.5, 5.0
"""Pause between looks, at first and when nothing has changed for minutes."""
ONCE_SECONDS, AGAIN_SECONDS = 60.0, 5.0
"""Longest time of `survey_once`, and the pause between its listings."""
MAX_OLDER = 8
"""Number of older attempts of a job that are read. If each dies at once, there may be hundreds."""


class Observer:
    """Gives the statuses of artifacts at each look. A look reads the heartbeats of jobs that have begun.

    A job's status is that of its newest attempt. While that one gives no sign of life, it is the status of an older
    attempt that still trains, if there is one. Older attempts are read only then, usually by one request per job.

    Some looks list files by `listing` (earlier statuses -> statuses): after a tenth of the time since the last change,
    but at least `least` and at most `most` seconds; before a change in heartbeats is reported; and after `least`
    seconds while a job is silent, since another attempt may live.
    """

    def __init__(
        self,
        run: Run,
        listing: Callable[[Sequence[Status]], list[Status]],
        least: float = 0.0,
        most: float = LIST_SECONDS,
    ):
        self._run, self._listing, self._least, self._most = run, listing, least, most
        self._seen = Sightings()
        self._seen_older: dict[str, Sightings] = {}  # by the newest attempt: a new one starts new sightings
        self._newest, self._known = list[Status](), list[Status]()  # by the newest attempts only, and as returned
        self._listed_at: float | None = None
        self._changed_at = math.inf

    def look(self, now: float) -> list[Status]:
        """All statuses, with the time for which each job has been silent. `now`: seconds by the observer's clock."""
        statuses = self._list(now) if self._due(now) else self._judge(reread(self._run, self._newest), now)
        if self._listed_at != now and _outline(statuses) != _outline(self._known):
            statuses = self._list(now)
        if _outline(statuses) != _outline(self._known):
            self._changed_at = now
        self._known = statuses
        return statuses

    def pause(self, now: float) -> float:
        """Default pause until the next look: a fiftieth of the time without a change, within limits."""
        return min(MAX_PAUSE_SECONDS, max(LOOK_SECONDS, (now - self._changed_at) / 50))

    def list_next(self) -> None:
        """Make the next look list files."""
        self._listed_at = None

    def _due(self, now: float) -> bool:
        if self._listed_at is None:
            return True
        alarmed = any(known.silent for known in self._known)
        pause = self._least if alarmed else max(self._least, (now - self._changed_at) / 10)
        return now - self._listed_at >= min(self._most, pause)

    def _list(self, now: float) -> list[Status]:
        statuses = self._judge(self._listing(self._known), now)
        self._listed_at = now
        return statuses

    def _judge(self, statuses: Iterable[Status], now: float) -> list[Status]:
        self._newest = observe(statuses, self._seen, now)
        doubted = {known.artifact for known in self._newest if _doubted(known, self._seen, now)}
        names = [_name(known) for known in self._newest if known.artifact in doubted]
        self._seen_older = {name: self._seen_older.get(name) or Sightings() for name in names}
        if not doubted:
            return self._newest

        def with_older(known: Status) -> Status:
            return self._with_older(known, now) if known.artifact in doubted else known

        with ThreadPoolExecutor(REQUESTS) as pool:
            return list(pool.map(with_older, self._newest))

    def _with_older(self, known: Status, now: float) -> Status:
        """The status by an older attempt that is seen to live; otherwise with the older attempts that may live."""
        job, seen = known.job, self._seen_older[_name(known)]
        assert job and job.files
        moved: list[Status] = []
        undecided: list[int] = []
        numbers = sorted(job.files.older[:MAX_OLDER], key=lambda each: not seen.changed(sight_of(known.artifact, each)))
        for number in numbers:
            # This look has already read the job's last heartbeat.
            read = known.state == "begun" and job.heartbeat.get("attempt") == number
            heartbeat = job.heartbeat if read else Attempt(self._run.store, known.artifact, number).last_beat()
            if not heartbeat:
                continue
            older = JobStatus(number, heartbeat, None, job.milestone, job.saved, beside=job, files=job.files)
            status = replace(known, state="begun", job=older)
            assert status.lease
            verdict = judge(known.artifact, [status.lease], seen, now)[number]
            status = replace(status, silent_seconds=seen.see(_name(status), older.beat, now))
            if seen.changed(_name(status)):
                moved.append(status)
            if verdict == "alive":
                break
            if verdict == "silent":
                undecided.append(number)
        if moved and (known.state == "failed" or known.silent or job.left or not job.beats):
            return min(moved, key=lambda status: status.silent_seconds or 0.0)
        return replace(known, older=tuple(undecided))


def _outline(statuses: Iterable[Status]) -> list[tuple[object, ...]]:
    """Facts that are compared between two looks. If they differ, a listing may show more."""
    jobs = [(known, known.job) for known in statuses]
    return [(known.artifact, known.state, known.silent, job and (job.attempt, job.phase)) for known, job in jobs]


def observe(statuses: Iterable[Status], seen: Sightings, now: float) -> list[Status]:
    """The statuses, with the time until `now` for which an observer with these sightings saw no sign of each job."""

    def silent_seconds(status: Status) -> float | None:
        return None if status.job is None else seen.see(_name(status), status.job.sign, now)

    return [replace(status, silent_seconds=silent_seconds(status)) for status in statuses]


def _name(status: Status) -> str:
    """Name of the counter of the status's attempt."""
    assert status.job
    return sight_of(status.artifact, status.job.attempt)


def _doubted(status: Status, seen: Sightings, now: float) -> bool:
    """True if an older attempt may train while the newest gives no sign of life."""
    job = status.job
    if job is None or job.files is None or status.lease is None or status.state not in ("begun", "failed"):
        return False
    return bool(job.files.older) and judge(status.artifact, [status.lease], seen, now)[job.attempt] != "alive"


def survey_once(
    run: Run, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> list[Status]:
    """A survey that also says which jobs live. Begun jobs are observed until each has beaten or counts as silent.

    It takes at most ONCE_SECONDS. After that, jobs with slow steps may be unjudged; launches without an attempt are.
    """
    observer, began = Observer(run, partial(survey, run), least=AGAIN_SECONDS, most=AGAIN_SECONDS), clock()
    statuses = observer.look(began)
    undecided = {each.artifact for each in statuses if each.older or (each.state == "begun" and each.job)}
    while undecided and clock() - began < ONCE_SECONDS:
        sleep(LOOK_SECONDS)
        statuses = observer.look(clock())
        undecided &= {status.artifact for status in statuses if _undecided(status)}
    undecided |= {each.artifact for each in statuses if each.state == "waiting" and each.job}
    return [replace(status, unjudged=status.artifact in undecided) for status in statuses]


def _undecided(status: Status) -> bool:
    """True if it isn't known yet whether the job lives."""
    return bool(status.older) or (status.state == "begun" and bool(status.silent_seconds) and not status.silent)
