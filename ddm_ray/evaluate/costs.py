"""Costs of training, from the manifests of the finished jobs."""

from dataclasses import dataclass

from ddm_ray.storage.graph import MONOLITH, ROUTER, Artifact
from ddm_ray.storage.info import TrainedInfo
from ddm_ray.storage.run import Run


@dataclass(frozen=True)
class JobCost:
    """One training job. `flops`: forward and backward of all rows seen; `seconds`: its loop's wall time."""

    job: str
    parameters: int
    steps: int
    rows_seen: int
    flops: float
    seconds: float
    attempts: int
    loss: float


@dataclass(frozen=True)
class TrainingCost:
    """All jobs, and the paper's promise: experts together cost as much as the monolith, the router a few percent."""

    jobs: list[JobCost]
    experts_flops: float
    experts_over_monolith: float
    router_over_experts: float


def training_cost(run: Run) -> TrainingCost:
    """Costs of experts, router and monolith. Raises MissingArtifact for a job that isn't finished."""
    jobs = {artifact: _job(run, artifact) for artifact in [*run.experts, ROUTER, MONOLITH]}
    experts_flops = sum(jobs[artifact].flops for artifact in run.experts)
    return TrainingCost(
        jobs=list(jobs.values()),
        experts_flops=experts_flops,
        experts_over_monolith=experts_flops / jobs[MONOLITH].flops,
        router_over_experts=jobs[ROUTER].flops / experts_flops,
    )


def _job(run: Run, artifact: Artifact) -> JobCost:
    info = TrainedInfo.of(run.require(artifact))
    return JobCost(
        job=artifact,
        parameters=info.parameters,
        steps=info.step,
        rows_seen=info.rows_seen,
        flops=info.training_flops,
        seconds=info.seconds,
        attempts=info.attempts,
        loss=info.loss,
    )
