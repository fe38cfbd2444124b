"""TrainJob + Placement -> TorchTrainer, in a placement group of its own; and many at once, watched on storage."""

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from ddm_ray.errors import DDMError, TrainingError
from ddm_ray.placement import Placement
from ddm_ray.storage.run import Run

POLL_SECONDS = 0.5


def _worker(config: dict[str, Any]) -> None:
    from ddm_ray.train.worker import train  # torch and DeepSpeed load in the workers only

    train(config["run"], config["artifact"], Placement.model_validate(config["placement"]))


def fit(run_url: str, artifact: str, placement: Placement) -> None:
    """Run one training job to its end on the connected Ray. Raises what the workers raised last."""
    run = Run.open(run_url)
    filesystem, path = run.store.filesystem(f"{artifact}/attempts/_ray")
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"run": run.url, "artifact": artifact, "placement": placement.model_dump()},
        torch_config=TorchConfig(backend="nccl" if placement.use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=placement.workers,
            use_gpu=placement.use_gpu,
            resources_per_worker=placement.resources_per_worker,
        ),
        run_config=RunConfig(
            # A name used twice would silently continue the old one; what counts is in our own attempts.
            name=uuid.uuid4().hex[:12],
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=placement.max_failures),
        ),
    )
    trainer.fit()


def train_all(run: Run, artifacts: list[str], placement: Placement, watch: Callable[[], None] | None = None) -> None:
    """Train several artifacts of a run side by side; returns when all are committed, which storage says.

    `watch` is called about twice a second. Raises DDMError as soon as one job has given up.
    """
    waiting = {artifact for artifact in artifacts if not run.finished(artifact)}
    supervisors = [_Supervisor(run, artifact, placement) for artifact in artifacts if artifact in waiting]
    for supervisor in supervisors:
        supervisor.start()
    while waiting:
        time.sleep(POLL_SECONDS)
        ended = [supervisor for supervisor in supervisors if not supervisor.is_alive()]
        waiting = {artifact for artifact in waiting if not run.finished(artifact)}
        if watch:
            watch()
        for supervisor in ended:
            if supervisor.artifact in waiting:
                raise supervisor.reason()


class _Supervisor(threading.Thread):
    """Calls `fit` in a thread, again where Ray Train's controller died: nothing in Ray Train revives that.

    A daemon, since `fit` returns many seconds after the artifact is committed and nobody waits for it.
    """

    def __init__(self, run: Run, artifact: str, placement: Placement):
        super().__init__(name=f"fit {artifact}", daemon=True)
        self.run_, self.artifact, self.placement = run, artifact, placement
        self.error: Exception | None = None

    def run(self) -> None:
        for _ in range(self.placement.max_failures + 1):
            try:
                fit(self.run_.url, self.artifact, self.placement)
            except ray.exceptions.RayActorError as error:
                self.error = error
            except Exception as error:
                self.error = error
                return
            else:
                return

    def reason(self) -> DDMError:
        """Why the job stopped without committing, as the innermost error that a worker raised."""
        if self.error is None:
            return TrainingError(f"{self.artifact} ended uncommitted; run {self.run_.command(self.artifact)}")
        cause: BaseException = self.error
        while inner := _inner(cause):
            cause = inner
        if isinstance(cause, DDMError):
            return cause
        text = " ".join(str(cause).split())[-300:]
        return TrainingError(f"{self.artifact} stopped: {text}; the same command goes on from its last state")


def _inner(error: BaseException) -> BaseException | None:
    failures = getattr(error, "worker_failures", None)
    if failures:
        return next(iter(failures.values()))
    return getattr(error, "cause", None) or error.__cause__
