"""TrainJob + TrainPlacement -> Ray Train in a placement group of its own, whose workers save before they leave."""

import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray.train
from ray.exceptions import GetTimeoutError, RayActorError

from ddm_ray import ray_internals as internals
from ddm_ray.errors import DDMError, GaveUp, OutOfMemory, Preempted, Stopped, StorageError, Superseded
from ddm_ray.memory import KEEP_FREED_MEMORY
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.attempts import Attempt, claimed
from ddm_ray.storage.launches import FailureBudget, Launch
from ddm_ray.storage.patience import PATIENT
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import Store
from ddm_ray.train.ray.recovery import innermost, reason, run_id
from ddm_ray.train.ray.world import World

# Seconds between looks of a running job for room for more workers; each growth costs a start of all of them.
GROWTH_SECONDS = 15.0
# Limits on how long a growing job waits for its workers to save a state and leave, and for one of their answers.
LEAVE_SECONDS, ANSWER_SECONDS = 600.0, 30.0


_ControllerCallback: Any = internals.CONTROLLER_CALLBACK.get()
_WorkerGroupCallback: Any = internals.WORKER_GROUP_CALLBACK.get()
_DataParallelTrainer: Any = internals.TRAINER.get()


class WorkerDrained(Exception):
    """Raised by a worker that saved a state and left because it was asked to; Ray Train then starts a new group."""


class PreemptionNotice:
    """Tells the training loop, at each step, whether this worker is to save a state and leave.

    True once a node of the group is to be taken away, or when the group is about to be resized. A call costs
    microseconds and waits for nobody, so ranks hear it at different steps and have to agree.
    """

    def __init__(self) -> None:
        self._train_context = internals.TRAIN_CONTEXT.get()()

    def __call__(self) -> bool:
        _listening.set()
        return _leave.is_set() or self._train_context.preemption_context.preemption_info is not None


# A worker's process serves one attempt; the controller speaks to another thread of it than the loop's.
_listening, _leave = threading.Event(), threading.Event()


def _ask_to_leave() -> bool:
    _leave.set()
    return _listening.is_set()


def _trains() -> bool:
    return bool(internals.TRAIN_CONTEXT.get()().execution_context.training_thread_runner.is_running())


class ElasticResizeCallback(_ControllerCallback, _WorkerGroupCallback):  # type: ignore[misc]
    """Has the workers of a sound group save a state and leave before it is resized, so that growing costs no steps."""

    def __init__(self) -> None:
        self._group: Any = None

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group = worker_group

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        self._group = None

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        if _is_dead():
            os._exit(1)
        status = self._group.get_latest_poll_status() if self._group else None
        if status is None or status.errors:
            return  # a first start, or a group that has failed
        deadline = time.monotonic() + LEAVE_SECONDS
        try:
            # One that never listened has no step to lose.
            listened = self._each(_ask_to_leave)
            while all(listened) and any(self._each(_trains)) and time.monotonic() < deadline:
                time.sleep(0.1)
        except (RayActorError, GetTimeoutError):
            return  # a loss just now: what was saved last counts

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """End the controller when workers fail to start: it owns their placement group, which Ray never releases."""
        if isinstance(current_state, internals.RESCHEDULING.get()):
            failure = getattr(current_state.training_failed_error, "controller_failure", None)
            if isinstance(failure, internals.STARTUP_FAILED.get()):
                os._exit(1)

    def _each(self, asked: Callable[[], bool]) -> list[bool]:
        return ray.get([worker.execute_async(asked) for worker in self._group.get_workers()], timeout=ANSWER_SECONDS)


def _is_dead() -> bool:
    """True if Ray takes this actor for dead, though its process may live on for seconds.

    If it started workers then, nothing would ever free their resources.
    """
    record = internals.ACTORS.get()(ray.get_runtime_context().get_actor_id())
    return bool(record.get("State") == "DEAD")


class _Trainer(_DataParallelTrainer):  # type: ignore[misc]
    """A trainer without data sets of Ray's, as workers read their rows themselves, and without its cleaner of places.

    The cluster is tended for dead controllers by `tend_cluster`, by what the GCS knows of them.
    """

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()
        unwanted = internals.DATASETS_CALLBACK.get(), internals.CLEANER_CALLBACK.get()
        return [each for each in callbacks if not isinstance(each, unwanted)]


class FailureBudgetCallback(ray.train.UserCallback):
    """Spends the launch's failure budget on losses of workers that nobody announced."""

    def __init__(self, budget: FailureBudget):
        self._budget = budget

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by the controller for each loss of workers.

        Raises what ends the controller: an error that trying again won't mend, Superseded by another launch and Stopped
        among them; GaveUp once there were too many, or StorageError if storage can't be made to say so.
        """
        errors = list(worker_exceptions.values())
        causes = [innermost(error) for error in errors]
        if any(isinstance(cause, WorkerDrained) or getattr(cause, "preempted", False) for cause in causes):
            return
        for cause in causes:
            if _ends_the_launch(cause):
                raise cause
        # Where one was killed, the others only lost their connection to it.
        killed = [error for error in errors if isinstance(innermost(error), RayActorError)]
        text = reason([*killed, *errors][0])
        if self._budget.spend(text):
            raise self._budget.refusal or GaveUp(text)


def _ends_the_launch(cause: BaseException) -> bool:
    """True for an error of a worker after which its launch tries no more."""
    if isinstance(cause, Superseded):
        return not cause.by_its_own_launch
    final = isinstance(cause, DDMError) and not cause.passes and not isinstance(cause, OutOfMemory)
    return final or isinstance(cause, Stopped)


def fit(run_url: str, launch: Launch, placement: TrainPlacement) -> None:
    """Run one launch's training job to its end on the connected Ray; a record on storage says when it gives up.

    Raises what the workers raised last, ControllerError for what went wrong while they started, around a StorageError
    if that record can't be written, around Superseded or Stopped, or RayActorError if its controller was killed.
    """
    run = Run.open(run_url, PATIENT)
    filesystem, path = run.store.filesystem(f"{launch.prefix}/ray")
    workers = placement.workers
    train: Any = ray.train  # its type hints are those of its first version
    trainer = _Trainer(
        _worker,
        train_loop_config={"run": run.url, "launch": asdict(launch), "placement": placement.model_dump()},
        backend_config=World(placement.use_gpu),
        scaling_config=train.ScalingConfig(
            num_workers=(workers.min, workers.max) if workers.elastic else workers.min,
            elastic_resize_monitor_interval_s=GROWTH_SECONDS,
            use_gpu=placement.use_gpu,
            resources_per_worker=placement.resources_per_worker,
        ),
        run_config=train.RunConfig(
            # A name used twice would silently continue the old one; what counts is in our own attempts.
            name=uuid.uuid4().hex[:12],
            storage_path=path,
            storage_filesystem=filesystem,
            # For ever: the budget says when it is enough.
            failure_config=train.FailureConfig(max_failures=-1),
            callbacks=[
                FailureBudgetCallback(FailureBudget(run.url, launch, placement.max_failures)),
                ElasticResizeCallback(),
            ],
            worker_runtime_env={"env_vars": KEEP_FREED_MEMORY},
        ),
    )
    object.__setattr__(trainer.train_run_context, "run_id", run_id(run, launch.artifact))
    trainer.fit()


def _worker(config: dict[str, Any]) -> None:
    from ddm_ray.train.worker import train  # torch and DeepSpeed load in the workers only

    store, launch = Store(config["run"], PATIENT), Launch(**config["launch"])
    artifact = launch.artifact
    before = max(claimed(store, artifact), default=0)
    try:
        train(store.url, artifact, TrainPlacement.model_validate(config["placement"]), PreemptionNotice(), launch)
    except Preempted:
        raise WorkerDrained(artifact) from None
    except OutOfMemory:
        raise
    except (Stopped, Superseded) as error:
        if not getattr(error, "by_its_own_launch", False):
            _give_up(store, launch, error)
        raise
    except DDMError as error:
        if error.passes:
            raise
        # An attempt notes its own error; before there is one, trying again won't mend it.
        number = max(claimed(store, artifact), default=0)
        if number == before or not Attempt(store, artifact, number).failure():
            _give_up(store, launch, error)
        raise


def _give_up(store: Store, launch: Launch, error: DDMError) -> None:
    """Record that the launch has given up; what a full disk won't hold, the controller hears by the error itself."""
    with suppress(StorageError):
        launch.give_up(store, error)
