"""The loop that watches a run: a live table, and callbacks for surveys and events."""

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
# Time between two looks, on a disk and in a bucket, where 256 experts cost half a dollar a day.
EVERY_SECONDS, PAID_EVERY_SECONDS = 2.0, 15.0


def pause_of(run: Run) -> float:
    """Default seconds between two looks at a run."""
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
    """Show a live table and pass on surveys, `every` seconds, until everything that the run trains is finished.

    `phrase` puts remedies into words. `islands` maps a time in seconds to rows of the table: an island's name, what it
    does, and whether that is an alarm. During a storage outage there is a warning, and looks are repeated. Raises
    StorageError only if the first look fails.
    """
    observer, events = Observer(run, partial(survey, run)), Events(run.url, stalled_after, phrase)

    rows: list[tuple[str, str, bool]] = []

    def look() -> list[Status]:
        nonlocal rows
        now = time.monotonic()
        statuses = observer.look(now)
        with suppress(StorageError):  # a key that can read only the artifacts is enough
            rows = list(islands(now))
        return statuses

    statuses = look()
    with LiveView(run.url, [status.artifact for status in statuses], clock=False, phrase=phrase) as view:
        while True:
            view.show_statuses(statuses)
            fractions = [job.fraction for job in jobs_of(run, statuses)]
            for name, text, alarm in rows:
                # An island's row shows the progress of the whole run. Only committed artifacts count as 100 %.
                view.show(name, min(0.99, sum(fractions) / len(fractions)), text, alarm)
            on_survey(statuses)
            for event in events.seen(statuses):
                on_event(event)
            if trained(run, statuses):
                return
            time.sleep(every)
            statuses = _again(look, warn, every)


def trained(run: Run, statuses: list[Status]) -> bool:
    """True if all experts and the router are finished, and other models if they have begun."""
    return all(job.state == "finished" for job in jobs_of(run, statuses))


def jobs_of(run: Run, statuses: list[Status]) -> list[Status]:
    """The statuses of all models that have to be trained: experts, router, and others that have begun."""
    by_artifact = {status.artifact: status for status in statuses}
    jobs = [by_artifact[job] for job in trained_of(run.config)]
    return [job for job in jobs if job.artifact.kind not in EXTRAS or _begun(job)]


def _begun(status: Status) -> bool:
    """True if there was an attempt. A launch without one doesn't count."""
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
