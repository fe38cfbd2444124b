"""A process for each training, which runs Ray Train as a Ray job of its own: by its end Ray frees all that it held.

The processes are forked from a server that loads Ray Train once for all trainings of a command.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from ddm_ray.errors import DDMError, GaveUp, StorageError
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.launches import FailureBudget, Launch
from ddm_ray.storage.patience import PATIENT
from ddm_ray.storage.run import Run

# Pause before storage that is away is asked again.
AWAY_SECONDS = 10.0
# Limit on how long a driver may take to end its workers, once it is asked to.
STOP_SECONDS = 10.0

AGAIN = "the same command goes on from its last state"

_context = multiprocessing.get_context("forkserver")


def load_ray_train() -> None:
    """Start the server that drivers are forked from, which loads Ray Train in some seconds; doesn't wait for it."""
    _context.set_forkserver_preload(["ddm_ray.train.ray.fit"])
    forkserver.ensure_running()


class Driver:
    """The process that trains one launch's artifact on the Ray at `address`, until it is committed or given up.

    It ends with this process, if not before. One that is killed is replaced while the launch's failure budget lasts.
    """

    def __init__(self, address: str, run_url: str, launch: Launch, placement: TrainPlacement):
        load_ray_train()
        self._job = address, run_url, launch, placement
        self._budget = FailureBudget(run_url, launch, placement.max_failures)
        self._stopped = False
        self._error: DDMError | None = None
        self._process, self._answer = self._started()

    @property
    def sentinel(self) -> int:
        """Handle that `multiprocessing.connection.wait` finds ready once the process has ended."""
        return self._process.sentinel

    def ended(self) -> bool:
        """True once it tries no more."""
        if self._process.is_alive():
            return False
        if self._process.exitcode == 0 or self._stopped:
            return True
        if self._budget.spend(f"the driver was killed or crashed (exit code {self._process.exitcode})"):
            return True
        self._process, self._answer = self._started()
        return False

    def error(self) -> DDMError | None:
        """Why it ended; None if it has trained to the end, or was stopped or killed."""
        with suppress(EOFError):
            self._error = self._error or self._answer.recv()
        return self._error or self._budget.refusal

    def ask_to_stop(self) -> None:
        """Have it end its workers; `stop` waits for that."""
        self._stopped = True
        if self._process.is_alive() and self._process.pid:
            os.kill(self._process.pid, signal.SIGINT)  # on which Ray Train aborts

    def stop(self) -> None:
        """End it, within STOP_SECONDS."""
        self.ask_to_stop()
        self._process.join(STOP_SECONDS)
        self._process.kill()
        self._process.join()

    def _started(self) -> tuple[ForkServerProcess, Connection]:
        """A process that trains, and what it answers in the end."""
        answer, own = _context.Pipe(duplex=False)
        process = _context.Process(target=_drive, args=(*self._job, dict(os.environ), own), daemon=True)
        process.start()
        own.close()
        return process, answer


def _drive(
    address: str,
    run_url: str,
    launch: Launch,
    placement: TrainPlacement,
    variables: Mapping[str, str],
    answer: Connection,
) -> None:
    """Train, in the driver's process, and send to `answer` the DDMError that ends the launch, if one does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(variables)
    # What is to be known is on storage; Ray would print its guesses about each lost worker.
    with Path(os.devnull).open("wb") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    try:
        train_to_the_end(address, run_url, launch, placement)
    except DDMError as error:
        answer.send(error)
    except Exception as error:
        from ddm_ray.train.ray.recovery import reason

        answer.send(GaveUp(f"{launch.artifact} stopped: {reason(error)}; {AGAIN}"))


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def train_to_the_end(address: str, run_url: str, launch: Launch, placement: TrainPlacement) -> None:
    """Train in a Ray job; a controller that is killed or fails is replaced, while the launch's failure budget lasts.

    Raises the error of the workers after which a launch tries no more; GaveUp; RayAway for a Ray that is gone; and
    StorageError that doesn't pass, or where storage can't be made to say that the launch has given up.
    """
    from ray.exceptions import RayActorError
    from ray.train import ControllerError

    from ddm_ray.ray_session import losses_of_ray, ray_job
    from ddm_ray.train.ray.fit import trainer
    from ddm_ray.train.ray.recovery import cancel_reservation, found_no_room, reason
    from ddm_ray.train.ray.world import job_environment

    budget, again = FailureBudget(run_url, launch, placement.max_failures), False
    while True:
        try:
            # A job each: with it ends the placement group of a controller that was killed.
            with losses_of_ray(), ray_job(address, job_environment(placement)):
                training = trainer(Run.open(run_url, PATIENT), launch, placement)
                try:
                    training.fit()
                    return
                except (RayActorError, ControllerError) as error:
                    cancel_reservation(training)
                    lost = error
        except StorageError as error:
            if not again or not error.passes:
                raise
            time.sleep(AWAY_SECONDS)  # it was there, and will be
            continue
        again = True
        refusal = getattr(lost, "controller_failure", None)
        if isinstance(refusal, DDMError):
            raise refusal from None  # given up, or left to others
        if not found_no_room(lost) and budget.spend(reason(lost)):
            raise budget.refusal or GaveUp(f"{launch.artifact} stopped: {reason(lost)}; {AGAIN}")
