"""A driver process for each training job. It runs Ray Train as a Ray job, so that Ray frees its resources at its end.

The processes are forked from a server that loads libraries once for all trainings of a command.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from ddm_ray.errors import DDMError, GaveUp
from ddm_ray.jobs.launches import FailureBudget, Launch
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.run import Run
from ddm_ray.store.retries import LONG_RETRIES

# Seconds between two looks of a driver: has the training ended, or its server?
LOOK_SECONDS = 0.5
# Seconds that a driver may take to end after a request to stop.
STOP_SECONDS = 10.0

_context = multiprocessing.get_context("forkserver")


def start_fork_server() -> None:
    """Start the server that drivers are forked from, without waiting for the seconds in which it loads libraries."""
    _context.set_forkserver_preload(["ddm_ray.train.ray.preloaded"])
    forkserver.ensure_running()


@dataclass(frozen=True)
class TryResult:
    """End of one try; with both fields None the artifact is committed.

    `error`: why the launch tries no more. `lost`: why it tries again; empty if nothing failed, but the cluster had no
    room for the workers.
    """

    error: DDMError | None = None
    lost: str | None = None


class Driver:
    """The process that trains one launch's artifact on the Ray at `address`, until it is committed or given up.

    It ends with this process at the latest. If it or its controller is lost, a new process tries again while the
    launch's failure budget lasts.
    """

    def __init__(self, address: str, run_url: str, launch: Launch, placement: TrainPlacement):
        start_fork_server()
        self._job, self._artifact = (address, run_url, launch, placement), launch.artifact
        self._budget = FailureBudget(run_url, launch, placement.max_failures)
        self._error: DDMError | None = None
        self._over = False
        self._process, self._link = self._started()

    @property
    def sentinel(self) -> int:
        """Handle that `multiprocessing.connection.wait` finds ready once the process has ended."""
        return self._process.sentinel

    def ended(self) -> bool:
        """True once the launch tries no more."""
        if self._over or self._process.is_alive():
            return self._over
        result = self._result()
        if result.lost and self._budget.spend(result.lost):
            again = "the same command goes on from its last state"
            gave_up = GaveUp(f"{self._artifact} stopped: {result.lost}; {again}")
            result = TryResult(self._budget.refusal or gave_up)
        if result.lost is None:
            self._error, self._over = result.error, True
        else:
            self._process, self._link = self._started()
        return self._over

    def error(self) -> DDMError | None:
        """The error that ended it; None if it has trained to the end, or was stopped."""
        return self._error

    def ask_to_stop(self) -> None:
        """Ask it to end, and its workers with it; `stop` waits for that."""
        self._over = True
        self._link.close()

    def stop(self) -> None:
        """End it, within STOP_SECONDS."""
        self.ask_to_stop()
        self._process.join(STOP_SECONDS)
        self._process.kill()
        self._process.join()

    def _result(self) -> TryResult:
        with suppress(EOFError, OSError):
            if self._link.poll():
                result: TryResult = self._link.recv()
                return result
        return TryResult(lost="the process that drove it was killed, or crashed")

    def _started(self) -> tuple[ForkServerProcess, Connection]:
        """A process that trains, and the link on which it sends its TryResult. It ends when the link is closed."""
        link, own = _context.Pipe()
        process = _context.Process(target=_drive, args=(self._job, dict(os.environ), own), daemon=True)
        process.start()
        own.close()
        return process, link


def _drive(job: tuple[str, str, Launch, TrainPlacement], variables: Mapping[str, str], link: Connection) -> None:
    """Try once, in the driver's process; end early if the link is closed, also by the death of the command."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    # Ray would print its guesses about each lost worker; the real reasons are on storage.
    with Path(os.devnull).open("wb") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    from ddm_ray.ray_session import ray_job
    from ddm_ray.train.ray.fit import trainer
    from ddm_ray.train.ray.losses_of_workers import cancel_reservation, reason_of_loss
    from ddm_ray.train.ray.world import job_environment

    (address, run_url, launch, placement), server = job, os.getppid()
    results = list[TryResult]()
    try:
        with ray_job(address, job_environment(placement)):
            # `ray job stop` signals the command and all below it; the command alone acts on that, and closes the link.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            training = trainer(Run.open(run_url, LONG_RETRIES), launch, placement)
            trying = threading.Thread(target=lambda: results.append(_fit(training)), daemon=True)
            trying.start()
            while trying.is_alive():
                if link.poll(LOOK_SECONDS) or os.getppid() != server:
                    cancel_reservation(training)
                    os.kill(os.getpid(), signal.SIGKILL)  # a normal exit would wait for the thread that waits for Ray
    except DDMError as error:
        results.append(TryResult(error))
    except Exception as error:
        results.append(TryResult(GaveUp(f"training can't begin: {reason_of_loss(error)}")))
    link.send(results[0])


def _fit(training: Any) -> TryResult:
    """Train, and say how it ended."""
    import ray
    from ray.train import ControllerError

    from ddm_ray.train.ray.losses_of_workers import cancel_reservation, found_no_room, reason_of_loss

    try:
        training.fit()
    except (ray.exceptions.RayError, ControllerError) as error:
        cancel_reservation(training)
        refusal = getattr(error, "controller_failure", None)
        if isinstance(refusal, DDMError):
            return TryResult(refusal)  # given up, or left to another launch
        return TryResult(lost="" if found_no_room(error) else reason_of_loss(error))
    except Exception as error:
        return TryResult(GaveUp(f"training stopped: {reason_of_loss(error)}"))
    return TryResult()
