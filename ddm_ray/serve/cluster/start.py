"""The start of a server as its command shows it: the step that is under way, and how many replicas are ready."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ray import serve
from ray.serve.schema import ApplicationStatusOverview

from ddm_ray.data import OnProgress

LOOK_SECONDS = 0.5
# Shares of the start: files are checked, then Ray starts, then Serve, then replicas with their networks.
CHECKED, RAY, SERVE, REPLICAS = 0.1, 0.2, 0.3, 0.95


def replicas(application: ApplicationStatusOverview) -> tuple[int, int]:
    """Number of an application's replicas that are ready, and of those that it has so far."""
    states = [part.replica_states for part in application.deployments.values()]
    ready = sum(number for each in states for state, number in each.items() if state.value == "RUNNING")
    return ready, sum(sum(each.values()) for each in states)


@contextmanager
def shown(on_progress: OnProgress, name: str, words: str) -> Iterator[None]:
    """Report, until the context ends, what the replicas of the application `name` do, and how many are ready."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(LOOK_SECONDS):
            with suppress(Exception):  # the application isn't known yet; it is only shown
                ready, number = replicas(serve.status().applications[name])
                share = SERVE + (REPLICAS - SERVE) * ready / max(1, number)
                on_progress(share, f"{words}: {ready} of {number} replicas are ready")

    on_progress(SERVE, words)
    thread = threading.Thread(target=work, name="start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
