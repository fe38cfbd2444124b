"""Looking at a run again and again: a live table, and whoever is told of what is found and of what has happened."""

import time
from collections.abc import Callable

from ddm_ray.errors import StorageError
from ddm_ray.progress import LiveView
from ddm_ray.storage.run import MONOLITH, ROUTER, Run
from ddm_ray.storage.status import Status, survey
from ddm_ray.watch.events import Event, Events


def watch(
    run: Run,
    on_survey: Callable[[list[Status]], None],
    on_event: Callable[[Event], None],
    warn: Callable[[str], None],
    every: float,
    stalled_after: float,
) -> None:
    """Show a live table, and pass on what is found every so many seconds, until all that the run trains is finished.

    Storage that can't be asked for a while is warned of and asked again; StorageError only if it never could.
    """
    found = survey(run)
    events = Events(run.url, stalled_after)
    with LiveView(f"ddm watch: {run.url}", [status.artifact for status in found], clock=False) as view:
        while True:
            view.found(found)
            on_survey(found)
            for event in events.seen(found, time.monotonic()):
                on_event(event)
            if trained(run, found):
                return
            time.sleep(every)
            found = _again(run, found, warn, every)


def trained(run: Run, found: list[Status]) -> bool:
    """Whether all experts and the router are finished, and the monolith if anyone has begun it."""
    states = {status.artifact: status.state for status in found}
    wanted = [*run.experts, *([] if run.config.partition.method == "given" else [ROUTER])]
    if states[MONOLITH] != "waiting":
        wanted.append(MONOLITH)
    return all(states[artifact] == "finished" for artifact in wanted)


def _again(run: Run, found: list[Status], warn: Callable[[str], None], every: float) -> list[Status]:
    told = False
    while True:
        try:
            return survey(run, found)
        except (StorageError, OSError) as error:
            if not told:
                warn(f"storage can't be asked, trying on: {error}")
            told = True
            time.sleep(every)
