"""What makes Ray Train notice a loss within seconds, and a job that fails again and again give up; light to import."""

import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from ddm_ray.errors import StorageError
from ddm_ray.placement import Placement
from ddm_ray.storage.attempts import OUT_OF_MEMORY, claimed, newest_claim
from ddm_ray.storage.manifest import NAME, sha256
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import Store

NODES_SECONDS = 1.0
COORDINATOR = "AutoscalingCoordinator"


def environment(placement: Placement) -> dict[str, str]:
    """Environment variables of a job's supervisor, which its controller and workers inherit; times in seconds."""
    return {
        # How often the controller asks its workers how they are; 2 by default.
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
        # How long a process that doesn't answer is waited for where its sentry doesn't run either; 600 by default.
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": f"{6 * placement.hang_seconds:g}",
        # How long a group waits for its place; 60 by default. One that counts on a node just lost waits in vain.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
        # How long ranks may take to take leave of each other; 30 by default. Next to a frozen one they never do.
        "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",
        # How often nodes that are to be taken away are looked for; 5 by default.
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "2",
        # Else what Ray Train asks about its own actors fails where a machine has several Ray clusters.
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }


def last_saved(store: Store, artifact: str) -> tuple[int, int]:
    """Attempt and step of a job's newest state that was committed, unread; (0, 0) if there is none."""
    for number in reversed(claimed(store, artifact)):
        folder = f"{artifact}/attempts/{number:04d}/state"
        for name in reversed(store.folders(folder)):
            if store.exists(f"{folder}/{name}/{NAME}"):
                return number, int(name.rpartition("-")[2])
    return 0, 0


class Streak:
    """How often in a row a job failed without having saved a state meanwhile; `most` is still endured."""

    def __init__(self, url: str, artifact: str, most: int):
        self._url, self._artifact, self._most = url, artifact, most
        self._failures, self._saved, self._excused = 0, last_saved(Store(url), artifact), 0

    def too_long(self) -> bool:
        """Count one more failure: whether it is one too many."""
        store = Store(self._url)
        try:
            saved, claim = last_saved(store, self._artifact), newest_claim(store, self._artifact)
            failure = claim and claim["failure"]
        except StorageError:
            return False  # storage that is away comes back, or the workers say so
        if claim and failure and failure["kind"] == OUT_OF_MEMORY and claim["attempt"] > self._excused:
            self._excused = claim["attempt"]
            if failure["micro_batch"] > 1:
                return False  # the next attempt takes fewer rows at once
        self._failures = 1 if saved > self._saved else self._failures + 1
        self._saved = saved
        return self._failures > self._most


def innermost(error: BaseException) -> BaseException:
    """The error that a worker raised, of what Ray made of it."""
    while True:
        failures = getattr(error, "worker_failures", None) or {}
        inner = next(iter(failures.values()), None) or getattr(error, "health_check_failure", None)
        inner = inner or getattr(error, "cause", None) or error.__cause__
        if inner is None:
            return error
        error = inner


def told(error: BaseException) -> str:
    """An error's text as one line of moderate length."""
    return " ".join(str(innermost(error)).split())[-300:]


def run_id(run: Run, artifact: str) -> str:
    """The name under which Ray Train reserves a job's resources: one started again takes over its predecessor's."""
    return sha256(f"{run.url} {artifact}".encode())[:16]


def forget(name: str) -> None:
    """Drop a reservation, which a killed controller leaves for 180 s to starve its elastic neighbours."""
    if coordinator := _coordinator():
        with suppress(RayActorError, GetTimeoutError):
            ray.get(coordinator.cancel_request.remote(f"train-{name}"), timeout=5)


def keep_nodes_known() -> None:
    """Tell Ray's coordinator at once when a node comes or goes, for ever: by itself it looks every 20 s."""
    known: set[str] = set()
    while True:
        there = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if there != known and (coordinator := _coordinator()):
            coordinator.get_reserved_resources.remote("", recompute=True)
            known = there
        time.sleep(NODES_SECONDS)


def _coordinator() -> Any:
    try:
        return ray.get_actor(COORDINATOR, namespace=COORDINATOR)
    except ValueError:
        return None  # nobody asked it for anything yet
