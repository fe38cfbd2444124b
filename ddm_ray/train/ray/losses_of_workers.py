"""Losses of workers and controllers: the reason in Ray's errors, and the reservation of a controller that is gone."""

import re
from contextlib import suppress

import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.train.torch import TorchTrainer

from ddm_ray.memory import full_memory
from ddm_ray.ray_internals import COORDINATOR_NAME
from ddm_ray.spelling import one_line

# A lost worker in the text of Ray's errors: `Worker IP address: 10.0.0.7 Worker port: 40001 Worker PID: 4711`.
_WHERE = re.compile(r"Worker (IP|PID)(?: address)?: ([\w.:]+)")


def innermost(error: BaseException) -> BaseException:
    """The error that a worker raised, inside the errors that Ray wraps it in."""
    while True:
        failures = getattr(error, "worker_failures", None) or {}
        inner = next(iter(failures.values()), None) or getattr(error, "health_check_failure", None)
        inner = inner or getattr(error, "cause", None) or error.__cause__
        if inner is None:
            return error
        error = inner


def reason_of_loss(error: BaseException) -> str:
    """The innermost error as one line of moderate length; of a lost process the facts, without Ray's guesses."""
    cause = innermost(error)
    if why := full_memory(str(cause)):
        return why
    if isinstance(cause, RayActorError) and "SYSTEM_ERROR" in str(cause):
        where = _WHERE.findall(str(cause))
        of = f" ({', '.join(f'{name.lower()} {value}' for name, value in where)})" if where else ""
        return f"a worker's process{of} was killed from outside, by hand or for want of memory, or it crashed"
    if isinstance(cause, ActorUnavailableError):
        return "a worker can't be reached: its node or the network is gone"
    if type(cause).__name__ == "WorkerHealthCheckTimeoutError":
        return "a worker gave no answer for too long"
    return one_line(cause, 300, tail=True)


def found_no_room(error: BaseException) -> bool:
    """True for a controller that ended because the cluster had no room for its workers for too long."""
    return type(getattr(error, "controller_failure", None)).__name__ == "WorkerGroupStartupTimeoutError"


def cancel_reservation(training: TorchTrainer) -> None:
    """Cancel the reservation of a killed controller, which Ray would keep from elastic trainings for 180 s."""
    with suppress(Exception):  # other trainings only wait longer: Ray may be gone, or nothing reserved yet
        coordinator = ray.get_actor(COORDINATOR_NAME, namespace=COORDINATOR_NAME)
        ray.get(coordinator.cancel_request.remote(f"train-{training.train_run_context.run_id}"), timeout=5)
