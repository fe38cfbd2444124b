"""TrainJob + Placement -> TorchTrainer, in a placement group of its own, whose workers leave well and return.

Built on Ray 2.60, whose controller has the hooks used here, though some are private.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import ray.train
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.controller.state import ReschedulingState

from ddm_ray.errors import DDMError, Preempted, StorageError, TooManyRows
from ddm_ray.placement import KEEP_FREED_MEMORY, Placement
from ddm_ray.storage.attempts import Attempt, claimed
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import Store
from ddm_ray.train.recovery import Streak, innermost, run_id, told

# How often a running job looks whether it could have more workers; each growth costs a start of all of them.
GROWTH_SECONDS = 15.0
# The longest that a growing job waits for its workers to save a state and leave, and for one answer of theirs.
LEAVE_SECONDS, ANSWER_SECONDS = 600.0, 30.0


class Left(Exception):
    """Raised by a worker that saved a state and left because it was asked to: for Ray Train, a reason to start anew."""


class Notice:
    """Asked at each step by the training loop: should this worker save a state and leave?

    True once a node of the group is to be taken away, or when the group is about to be resized. It costs microseconds
    and waits for nobody, so ranks hear it at different steps and have to agree.
    """

    def __init__(self) -> None:
        self._train_context = get_train_context()

    def __call__(self) -> bool:
        _listening.set()
        return _leave.is_set() or self._train_context.preemption_context.preemption_info is not None


# A worker's process serves one attempt; the controller speaks to another thread of it than the loop's.
_listening, _leave = threading.Event(), threading.Event()


def _ask_to_leave() -> bool:
    _leave.set()
    return _listening.is_set()


def _trains() -> bool:
    return get_train_context().execution_context.training_thread_runner.is_running()


class Farewell(ControllerCallback, WorkerGroupCallback):
    """Before a sound group is resized its workers save a state and leave, so that growing costs no steps."""

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
        """A group that failed when a part of it had started keeps its place for ever; with the controller it goes."""
        if isinstance(current_state, ReschedulingState):
            failure = getattr(current_state.training_failed_error, "controller_failure", None)
            if isinstance(failure, WorkerGroupStartupFailedError):
                os._exit(1)

    def _each(self, asked: Callable[[], bool]) -> list[bool]:
        return ray.get([worker.execute_async(asked) for worker in self._group.get_workers()], timeout=ANSWER_SECONDS)


def _is_dead() -> bool:
    """Whether for Ray this actor is dead; its process may live on for seconds.

    Were it to start workers then, nothing would ever free the places that it takes for them.
    """
    record = ray._private.state.actors(ray.get_runtime_context().get_actor_id())
    return record.get("State") == "DEAD"


class Patience(ray.train.UserCallback):
    """Tells whoever waits, through a file, that a job fails again and again without getting on."""

    def __init__(self, url: str, artifact: str, marker: str, most: int):
        self._url, self._marker = url, marker
        self._streak = Streak(url, artifact, most)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by the controller for each loss of workers; one that was announced doesn't count."""
        errors = list(worker_exceptions.values())
        if any(isinstance(innermost(error), Left) or getattr(innermost(error), "preempted", False) for error in errors):
            return
        if self._streak.too_long():
            # Where one was killed, the others only lost their connection to it.
            killed = [error for error in errors if isinstance(innermost(error), RayActorError)]
            Store(self._url).create(self._marker, told([*killed, *errors][0]).encode())


def fit(run_url: str, artifact: str, marker: str, placement: Placement) -> None:
    """Run one training job to its end on the connected Ray; the key `marker` is created when it is given up.

    Raises what the workers raised last, ControllerError for what went wrong while they started, or RayActorError if
    Ray Train's controller was killed.
    """
    run = Run.open(run_url)
    filesystem, path = run.store.filesystem(marker.rpartition("/")[0])
    workers = placement.workers
    train: Any = ray.train  # its type hints are those of its first version
    trainer = TorchTrainer(
        _worker,
        train_loop_config={
            "run": run.url,
            "artifact": artifact,
            "marker": marker,
            "placement": placement.model_dump(),
        },
        torch_config=TorchConfig(backend="nccl" if placement.use_gpu else "gloo"),
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
            # For ever: Patience says when it is enough.
            failure_config=train.FailureConfig(max_failures=-1),
            callbacks=[Patience(run.url, artifact, marker, placement.max_failures), Farewell()],
            worker_runtime_env={"env_vars": KEEP_FREED_MEMORY},
        ),
    )
    context: Any = trainer
    object.__setattr__(context.train_run_context, "run_id", run_id(run, artifact))
    trainer.fit()


def _worker(config: dict[str, Any]) -> None:
    from ddm_ray.train.worker import train  # torch and DeepSpeed load in the workers only

    store, artifact = Store(config["run"]), config["artifact"]
    before = max(claimed(store, artifact), default=0)
    try:
        train(config["run"], artifact, Placement.model_validate(config["placement"]), Notice(), config["marker"])
    except Preempted:
        raise Left(artifact) from None
    except (StorageError, TooManyRows):
        raise
    except DDMError as error:
        # Within an attempt that is told there; before there is one, trying again won't mend it.
        number = max(claimed(store, artifact), default=0)
        if number == before or not Attempt(store, artifact, number).failure():
            store.create(config["marker"], str(error).encode())
        raise
