"""Settings and signals by which Ray Train notices a loss within seconds, and the errors it wraps; light to import."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import ray
from ray import PlacementGroupID
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from ddm_ray import ray_internals as internals
from ddm_ray.placement import TrainPlacement
from ddm_ray.spelling import one_line
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.manifest import sha256
from ddm_ray.storage.run import Run

NODES_SECONDS, END_SECONDS = 1.0, 10.0
# What Ray knows of a worker that is gone: `Worker IP address: 10.0.0.7 Worker port: 40001 Worker PID: 4711`.
_WHERE = re.compile(r"Worker (IP|PID)(?: address)?: ([\w.:]+)")


def environment(placement: TrainPlacement) -> dict[str, str]:
    """Environment variables of a job's supervisor, which its controller and workers inherit; times in seconds."""
    return {
        # How often the controller asks its workers how they are; 2 by default.
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
        # Timeout for an unresponsive worker whose liveness monitor is dead too; 600 by default. By the clock alone, so
        # that on a crowded machine it must be long.
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": f"{60 * placement.hang_seconds:g}",
        # How long a group waits for its place; 60 by default. One that counts on a node just lost waits in vain.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
        # How often nodes that are to be taken away are looked for; 5 by default.
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "2",
        # Else what Ray Train asks about its own actors fails where a machine has several Ray clusters.
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }


def innermost(error: BaseException) -> BaseException:
    """The error that a worker raised, of what Ray made of it."""
    while True:
        failures = getattr(error, "worker_failures", None) or {}
        inner = next(iter(failures.values()), None) or getattr(error, "health_check_failure", None)
        inner = inner or getattr(error, "cause", None) or error.__cause__
        if inner is None:
            return error
        error = inner


def reason(error: BaseException) -> str:
    """The innermost error's text as one line of moderate length; of Ray's guesses about a lost process the fact."""
    cause = innermost(error)
    if isinstance(cause, RayActorError) and "SYSTEM_ERROR" in str(cause):
        who = _WHERE.findall(str(cause))
        of = f" ({', '.join(f'{name.lower()} {value}' for name, value in who)})" if who else ""
        return f"a worker's process{of} was killed from outside, by hand or for want of memory, or it crashed"
    if isinstance(cause, internals.UNANSWERED.get()):
        return "a worker gave no answer for too long"
    return one_line(cause, 300, tail=True)


def run_id(run: Run, artifact: Artifact) -> str:
    """The name under which Ray Train reserves a job's resources: one started again takes over its predecessor's."""
    return sha256(f"{run.url} {artifact}".encode())[:16]


def forget(name: str) -> None:
    """Drop a reservation, which a killed controller leaves for 180 s to starve its elastic neighbours."""
    if coordinator := _coordinator():
        with suppress(RayActorError, GetTimeoutError):
            ray.get(coordinator.cancel_request.remote(f"train-{name}"), timeout=5)


def tend_cluster() -> None:
    """Tell Ray's coordinator at once when a node comes or goes, since by itself it looks every 20 s; and free places.

    Never returns.
    """
    known, warned = set[str](), False
    while True:
        try:
            free_places_of_the_dead()
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            if alive != known and (coordinator := _coordinator()):
                coordinator.get_reserved_resources.remote("", recompute=True)
                known = alive
        except Exception as error:  # whatever a busy GCS answers: the next round may do
            if not warned:
                print(f"warning: the cluster can't be asked: {one_line(error, 300)}", file=sys.stderr)
            warned = True
        time.sleep(NODES_SECONDS)


def free_places_of_all() -> None:
    """Free the places of this Ray job's controllers, which have been killed; waits END_SECONDS for their deaths."""
    until = time.monotonic() + END_SECONDS
    while free_places_of_the_dead() and time.monotonic() < until:
        time.sleep(0.05)


def free_places_of_the_dead() -> int:
    """Remove placement groups of this Ray job whose controller has died: Ray keeps them until the job itself ends.

    The next controller would wait for their resources for ever. Returns how many are those of actors that live.
    """
    living = 0
    for group in _groups():
        if group.creator_actor_dead:
            remove_placement_group(PlacementGroup(PlacementGroupID(group.placement_group_id)))
        elif group.creator_actor_id:
            living += 1
    return living


def has_places() -> bool:
    """True if a living controller of this Ray job has resources for its workers."""
    return any(group.state == group.CREATED and not group.creator_actor_dead for group in _groups())


def _groups() -> Iterator[Any]:
    """Records of the placement groups that this Ray job has."""
    job = ray.get_runtime_context().get_job_id()
    for data in internals.STATE.get()._connect_and_get_accessor().get_placement_group_table():
        group = internals.PLACEMENT_GROUP_RECORD.get().FromString(data)
        if not group.is_detached and group.state != group.REMOVED and group.creator_job_id.hex() == job:
            yield group


def _coordinator() -> Any:
    try:
        return ray.get_actor(internals.COORDINATOR_NAME, namespace=internals.COORDINATOR_NAME)
    except ValueError:
        return None  # nobody asked it for anything yet
