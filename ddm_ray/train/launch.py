"""TrainJob + Placement -> TorchTrainer, in a placement group of its own; and many at once, watched on storage."""

import sys
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from ddm_ray.errors import DDMError, RayError, StorageError, TrainingError
from ddm_ray.placement import Placement
from ddm_ray.storage.run import Run
from ddm_ray.storage.store import Store

POLL_SECONDS = 0.5
FAILED = "FAILED"


def _folder(artifact: str) -> str:
    return f"{artifact}/attempts/_ray"


def _worker(config: dict[str, Any]) -> None:
    from ddm_ray.train.worker import train  # torch and DeepSpeed load in the workers only

    try:
        train(config["run"], config["artifact"], Placement.model_validate(config["placement"]), config["launch"])
    except StorageError:
        raise
    except DDMError as error:
        # Trying again won't mend it, but Ray Train will: tell whoever waits.
        Store(config["run"]).create(f"{config['folder']}/{FAILED}", str(error).encode())
        raise


def fit(run_url: str, artifact: str, name: str, placement: Placement) -> None:
    """Run one training job to its end on the connected Ray, whose own files go to a folder called `name`.

    Raises what the workers raised last.
    """
    run = Run.open(run_url)
    filesystem, path = run.store.filesystem(_folder(artifact))
    trainer = TorchTrainer(
        _worker,
        train_loop_config={
            "run": run.url,
            "artifact": artifact,
            "folder": f"{_folder(artifact)}/{name}",
            "launch": name,
            "placement": placement.model_dump(),
        },
        torch_config=TorchConfig(backend="nccl" if placement.use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=placement.workers,
            use_gpu=placement.use_gpu,
            resources_per_worker=placement.resources_per_worker,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=placement.max_failures),
        ),
    )
    trainer.fit()


def train_all(
    run: Run,
    artifacts: list[str],
    placement: Placement,
    watch: Callable[[], None] | None = None,
    may_grow: bool = False,
) -> None:
    """Train several artifacts of a run side by side; returns when all are committed, which storage says.

    `watch` is called about twice a second. Raises DDMError as soon as one job has given up, and RayError if the
    Ray cluster hasn't what the placement asks for, unless it `may_grow`: then that is said, and waited for.
    """
    waiting = [artifact for artifact in artifacts if not run.finished(artifact)]
    if not waiting:
        return
    if lack := _lack(placement):
        if not may_grow:
            raise RayError(f"{lack}; change workers or resources_per_worker in islands.yaml")
        print(f"warning: {lack}; waiting for it to grow", file=sys.stderr)
    # One process for all jobs, with no CPU of its own, started again and asked again if its node dies: nothing
    # in Ray Train revives a controller. Its `fit` returns long after the commit; nobody waits for that.
    actor: Any = ray.remote(Supervisor)
    supervisor = actor.options(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=len(waiting)).remote()
    # A name used twice would silently continue the old one; what counts is in our own attempts.
    names = {artifact: uuid.uuid4().hex[:12] for artifact in waiting}
    tasks = {supervisor.fit.remote(run.url, artifact, names[artifact], placement): artifact for artifact in waiting}
    while waiting:
        ended, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=POLL_SECONDS)
        waiting = [artifact for artifact in waiting if not run.finished(artifact)]
        if watch:
            watch()
        for artifact in waiting:
            failed = f"{_folder(artifact)}/{names[artifact]}/{FAILED}"
            if run.store.exists(failed):
                raise TrainingError(f"{artifact}: {run.store.read(failed).decode()}")
        for task in ended:
            artifact = tasks.pop(task)
            if artifact in waiting:
                raise _reason(run, artifact, task)


def _lack(placement: Placement) -> str | None:
    """What of the placement the Ray cluster hasn't now; Ray itself would wait for ever, without a word."""
    asked = dict(placement.resources_per_worker) | ({"GPU": 1} if placement.use_gpu else {})
    there = ray.cluster_resources()
    for name, amount in asked.items():
        if there.get(name, 0) < amount * placement.workers:
            return f"placement asks for {placement.workers} x {amount:g} {name}, Ray has {there.get(name, 0):g}"
    return None


class Supervisor:
    """An actor whose threads wait for Ray Train."""

    def fit(self, run_url: str, artifact: str, name: str, placement: Placement) -> None:
        """See `fit`."""
        fit(run_url, artifact, name, placement)


def _reason(run: Run, artifact: str, task: Any) -> DDMError:
    """Why a job stopped without committing: the innermost error that a worker raised."""
    try:
        ray.get(task)
    except Exception as error:
        cause: BaseException = error
        while inner := _inner(cause):
            cause = inner
        if isinstance(cause, DDMError):
            return cause
        text = " ".join(str(cause).split())[-300:]
        return TrainingError(f"{artifact} stopped: {text}; the same command goes on from its last state")
    return TrainingError(f"{artifact} ended uncommitted; run {run.command(artifact)}")


def _inner(error: BaseException) -> BaseException | None:
    failures = getattr(error, "worker_failures", None)
    if failures:
        return next(iter(failures.values()))
    return getattr(error, "cause", None) or error.__cause__
