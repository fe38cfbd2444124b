"""Looking at a run again and again: a live table, and whoever is told of what is found and of what has happened."""

import time
from collections.abc import Callable

from ddm_ray.errors import Fix, StorageError
from ddm_ray.storage.graph import trained_of
from ddm_ray.storage.pulse import Pulses
from ddm_ray.storage.run import Run
from ddm_ray.storage.status import Status, observe, survey
from ddm_ray.watch.events import Event, Events
from ddm_ray.watch.live_view import LiveView


def watch(
    run: Run,
    on_survey: Callable[[list[Status]], None],
    on_event: Callable[[Event], None],
    warn: Callable[[str], None],
    every: float,
    stalled_after: float,
    phrase: Callable[[Fix], str] = str,
) -> None:
    """Show a live table and pass on each survey, `every` seconds, until everything that the run trains is finished.

    `phrase` puts remedies into words. Storage that can't be asked for a while is warned of and asked again;
    StorageError only if it never could.
    """
    statuses = survey(run)
    pulses, events = Pulses(), Events(run.url, stalled_after, phrase)
    with LiveView(run.url, [status.artifact for status in statuses], clock=False, phrase=phrase) as view:
        while True:
            statuses = observe(statuses, pulses, time.monotonic())
            view.show_statuses(statuses)
            on_survey(statuses)
            for event in events.seen(statuses):
                on_event(event)
            if trained(run, statuses):
                return
            time.sleep(every)
            statuses = _again(run, statuses, warn, every)


def trained(run: Run, statuses: list[Status]) -> bool:
    """True if all experts and the router are finished, and the monolith if anyone has begun it."""
    states = {status.artifact: status.state for status in statuses}
    jobs = trained_of(run.config)
    return all(states[job] == "finished" for job in jobs if job.kind != "monolith" or states[job] != "waiting")


def _again(run: Run, known: list[Status], warn: Callable[[str], None], every: float) -> list[Status]:
    warned = False
    while True:
        try:
            return survey(run, known)
        except (StorageError, OSError) as error:
            if not warned:
                warn(f"storage can't be asked, trying on: {error}")
            warned = True
            time.sleep(every)
