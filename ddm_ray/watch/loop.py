"""Looking at a run again and again: a live table, and whoever is told of what is found and of what has happened."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ddm_ray.errors import StorageError
from ddm_ray.jobs.observer import Observer
from ddm_ray.jobs.status import Status, survey
from ddm_ray.remedies import Fix
from ddm_ray.run.graph import EXTRAS, trained_of
from ddm_ray.run.run import Run
from ddm_ray.watch.events import Event, Events
from ddm_ray.watch.live_view import LiveView

T = TypeVar("T")
# Time between two looks, on a disk and in a bucket: K = 256 experts there cost half a dollar a day.
EVERY_SECONDS, PAID_EVERY_SECONDS = 2.0, 15.0


def pause_of(run: Run) -> float:
    """Seconds between two looks at a run where nobody says how many."""
    return EVERY_SECONDS if run.store.local else PAID_EVERY_SECONDS


def watch(
    run: Run,
    on_survey: Callable[[list[Status]], None],
    on_event: Callable[[Event], None],
    warn: Callable[[str], None],
    every: float,
    stalled_after: float,
    phrase: Callable[[Fix], str] = str,
    islands: Callable[[float], Iterable[tuple[str, str, bool]]] = lambda now: (),
) -> None:
    """Show a live table and pass on each survey, `every` seconds, until everything that the run trains is finished.

    `phrase` puts remedies into words. `islands` gives rows of a table at a time in seconds: an island's name, what it
    does, and whether that is an alarm. Storage that can't be asked for a while is warned of and asked again;
    StorageError only if it never could.
    """
    observer, events = Observer(run, partial(survey, run)), Events(run.url, stalled_after, phrase)

    rows: list[tuple[str, str, bool]] = []

    def look() -> list[Status]:
        nonlocal rows
        now = time.monotonic()
        statuses = observer.look(now)
        with suppress(StorageError):  # a key to what is trained is enough
            rows = list(islands(now))
        return statuses

    statuses = look()
    with LiveView(run.url, [status.artifact for status in statuses], clock=False, phrase=phrase) as view:
        while True:
            view.show_statuses(statuses)
            fractions = [job.fraction for job in jobs_of(run, statuses)]
            for name, text, alarm in rows:
                # Its row tells of the whole run; only what is committed is wholly done.
                view.show(name, min(0.99, sum(fractions) / len(fractions)), text, alarm)
            on_survey(statuses)
            for event in events.seen(statuses):
                on_event(event)
            if trained(run, statuses):
                return
            time.sleep(every)
            statuses = _again(look, warn, every)


def trained(run: Run, statuses: list[Status]) -> bool:
    """True if all experts and the router are finished, and what else anyone has begun."""
    return all(job.state == "finished" for job in jobs_of(run, statuses))


def jobs_of(run: Run, statuses: list[Status]) -> list[Status]:
    """The statuses of all that has to be trained: experts and router, and what else anyone has begun."""
    by_artifact = {status.artifact: status for status in statuses}
    jobs = [by_artifact[job] for job in trained_of(run.config)]
    return [job for job in jobs if job.artifact.kind not in EXTRAS or _begun(job)]


def _begun(status: Status) -> bool:
    """True once there was an attempt: a launch in vain isn't one."""
    return status.state != "waiting" and (status.job is None or status.job.attempt > 0)


def _again(look: Callable[[], T], warn: Callable[[str], None], every: float) -> T:
    warned = False
    while True:
        try:
            return look()
        except (StorageError, OSError) as error:
            if not warned:
                warn(f"storage can't be asked, trying on: {error}")
            warned = True
            time.sleep(every)
