"""A launch and its placement -> Ray Train's TorchTrainer, in a placement group of its own."""

import uuid
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray.train
from ray.exceptions import RayActorError
from ray.train.torch import TorchConfig, TorchTrainer

from ddm_ray.cores import WAIT_ASLEEP
from ddm_ray.errors import DDMError, GaveUp, OutOfMemory, Overtaken, Preempted, Stopped, StorageError, Superseded
from ddm_ray.jobs.attempts import Attempt, claimed
from ddm_ray.jobs.launches import FailureBudget, Launch
from ddm_ray.memory import KEEP_FREED_MEMORY
from ddm_ray.placement import TrainPlacement
from ddm_ray.ray_internals import CLEANER_CALLBACK, DATASETS_CALLBACK
from ddm_ray.run.run import Run
from ddm_ray.store.retries import LONG_RETRIES
from ddm_ray.store.store import Store
from ddm_ray.train.ranks import backend
from ddm_ray.train.ray.leaving import LeaveNotice, WorkerDrained
from ddm_ray.train.ray.losses_of_workers import innermost, reason_of_loss
from ddm_ray.train.ray.world import COLLECTIVE_SECONDS, alone


class FailureBudgetCallback(ray.train.UserCallback):
    """Spends the launch's failure budget on losses of workers without notice."""

    def __init__(self, budget: FailureBudget):
        self._budget = budget

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by the controller for each loss of workers.

        Raises the error that ends the controller: one that a new try won't mend, also Superseded by another launch and
        Stopped; GaveUp after too many losses; StorageError if the loss can't be recorded.
        """
        errors = list(worker_exceptions.values())
        causes = [innermost(error) for error in errors]
        if any(isinstance(cause, WorkerDrained) or getattr(cause, "preempted", False) for cause in causes):
            return
        for cause in causes:
            if _ends_the_launch(cause):
                raise cause
        # If one worker was killed, the errors of the others are only lost connections to it.
        killed = [error for error in errors if isinstance(innermost(error), RayActorError)]
        text = reason_of_loss([*killed, *errors][0])
        if self._budget.spend(text):
            raise self._budget.refusal or GaveUp(text)


def _ends_the_launch(cause: BaseException) -> bool:
    """True for an error of a worker after which its launch tries no more."""
    if isinstance(cause, Superseded):
        return not cause.by_its_own_launch
    final = isinstance(cause, DDMError) and not cause.passes and not isinstance(cause, OutOfMemory)
    return final or isinstance(cause, Stopped)


class JobTrainer(TorchTrainer):
    """TorchTrainer without two actors a start, which cost seconds each.

    Workers read their rows themselves, and the end of the Ray job frees the placement group of a lost controller.
    """

    def _create_default_callbacks(self) -> list[Any]:
        callbacks: list[Any] = super()._create_default_callbacks()  # type: ignore[misc]
        unwanted = DATASETS_CALLBACK.get(), CLEANER_CALLBACK.get()
        return [each for each in callbacks if not isinstance(each, unwanted)]


def trainer(run: Run, launch: Launch, placement: TrainPlacement) -> JobTrainer:
    """The trainer of one launch on the connected Ray. Its `fit` returns once the artifact is committed.

    `fit` raises WorkerGroupError or ControllerError, which hold the first error, and RayActorError if its controller
    was killed. A launch that gives up records that on storage.
    """
    filesystem, path = run.store.filesystem(f"{launch.prefix}/ray")
    workers = placement.workers
    train: Any = ray.train  # its type hints are those of its first version
    return JobTrainer(
        _worker,
        train_loop_config={"run": run.url, "launch": asdict(launch), "placement": placement.model_dump()},
        torch_config=TorchConfig(backend=backend(placement.use_gpu), timeout_s=COLLECTIVE_SECONDS),
        scaling_config=train.ScalingConfig(
            num_workers=(workers.min, workers.max) if workers.elastic else workers.min,
            # Ray would resize the group without saving a state; LeaveNotice has the workers save one first.
            elastic_resize_monitor_interval_s=float("inf"),
            use_gpu=placement.use_gpu,
            resources_per_worker=placement.resources_per_worker,
        ),
        run_config=train.RunConfig(
            # With a name used before Ray would silently continue that run; states are in our own attempts.
            name=uuid.uuid4().hex[:12],
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=train.FailureConfig(
                max_failures=-1,  # FailureBudgetCallback ends the training
                # Workers that are lost while they start keep their placement group, until the job ends.
                controller_failure_limit=0,
                max_preemption_failures=-1,
            ),
            callbacks=[FailureBudgetCallback(FailureBudget(run.url, launch, placement.max_failures))],
            worker_runtime_env={"env_vars": KEEP_FREED_MEMORY | WAIT_ASLEEP},
        ),
    )


def _worker(config: dict[str, Any]) -> None:
    from ddm_ray.train.worker import train  # DeepSpeed loads in the workers only

    store, launch = Store(config["run"], LONG_RETRIES), Launch(**config["launch"])
    placement = TrainPlacement.model_validate(config["placement"])
    artifact = launch.artifact
    before = max(claimed(store, artifact), default=0)
    alone(placement.use_gpu)
    try:
        train(store.url, artifact, placement, LeaveNotice(placement), launch)
    except (Preempted, Overtaken):
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
        # An attempt notes its own error. Without an attempt the launch has to record it.
        number = max(claimed(store, artifact), default=0)
        if number == before or not Attempt(store, artifact, number).failure():
            _give_up(store, launch, error)
        raise


def _give_up(store: Store, launch: Launch, error: DDMError) -> None:
    """Record that the launch has given up; if a full disk refuses that, the controller still gets the error itself."""
    with suppress(StorageError):
        launch.give_up(store, error)
