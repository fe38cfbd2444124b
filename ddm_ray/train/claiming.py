"""Claiming an attempt: its number, and the rows at once and threads that it takes over from earlier attempts."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddm_ray.cores import threads_for
from ddm_ray.jobs.attempts import OUT_OF_MEMORY, Attempt, claim, claimed
from ddm_ray.jobs.fencing import require_standing
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.stops import StopRequests
from ddm_ray.jobs.versions import installed_versions
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store
from ddm_ray.train.job import TrainJob

FLOPS_PER_THREAD = 10**9
"""FLOPs of a step for which one more thread is worth waking: with two threads a step of 0.3e9 took 2.2 times as long as
with one, and a step of 15e9 0.83 times as long."""


def begin_attempt(
    lineage: Sequence[Run], job: TrainJob, placement: TrainPlacement, launch: Launch | None
) -> tuple[int, int, int]:
    """Claim the job's next attempt: its number, its rows at once, and its CPU threads.

    Raises the error that ended the launch, if it may begin no further attempt.
    """
    store = lineage[0].store
    if launch:
        require_standing(store, launch)
    StopRequests(store, job.artifact, launch).require_none()
    world = dist.get_world_size()
    share = math.ceil(job.batch / world)
    how = {name: getattr(placement, name) for name in ("zero_stage", "activation_checkpointing", "compile")}
    like: dict[str, Any] = {"asked": {"micro_batch": placement.micro_batch, "device": device_name(), **how}}
    most = rows_that_fit(store, job.artifact, like)
    world_fields = {"world_size": world, "versions": installed_versions(), **(launch.claim_fields() if launch else {})}
    threads = placement.threads or threads_of_last_attempt(lineage, job.artifact) or default_threads(placement, job)
    number = claim(store, job.artifact, {**world_fields, **like, "most_rows": most, "threads": threads}).number
    return number, min(rows for rows in (share, placement.micro_batch, most) if rows is not None), threads


def default_threads(placement: TrainPlacement, job: TrainJob) -> int:
    """CPU threads of a worker by default: one for each whole CPU that it asks Ray for.

    At least one, and at most one for each FLOPS_PER_THREAD of the worker's part of a step.
    """
    flops = job.training_flops(1) // placement.workers.max
    return min(threads_for(placement.asked.get("CPU", 1.0)), max(1, flops // FLOPS_PER_THREAD))


def threads_of_last_attempt(lineage: Sequence[Run], job: Artifact) -> int | None:
    """CPU threads of the job's last attempt, in this run or in one that it extends; None before the first attempt."""
    for run in lineage:
        if numbers := claimed(run.store, job):
            # Older versions didn't record the number: it was one, unless the placement gave another.
            return int(Attempt(run.store, job, max(numbers)).claim().get("threads", 1))
    return None


def rows_that_fit(store: Store, job: str, like: dict[str, Any]) -> int | None:
    """Number of rows that fit into memory at once, as the last attempt with these claim fields learnt; None: unknown.

    It is halved each time that memory runs out.
    """
    for number in reversed(claimed(store, job)):
        attempt = Attempt(store, job, number)
        claim_fields = attempt.claim()
        if like.items() <= claim_fields.items():
            break
    else:
        return None
    failure = attempt.failure()
    if failure is not None and failure["kind"] == OUT_OF_MEMORY:
        return max(1, failure.get("micro_batch", 1) // 2)
    return claim_fields.get("most_rows") or None


def device_name() -> str:
    """Name of the device that rows must fit into."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
