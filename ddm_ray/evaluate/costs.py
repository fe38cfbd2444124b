"""Costs of training, from the manifests of the finished jobs."""

from collections.abc import Collection
from dataclasses import dataclass

from ddm_ray.storage.graph import MONOLITH, ROUTER, trained_of
from ddm_ray.storage.info import TrainedInfo
from ddm_ray.storage.manifest import Manifest
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
    """All jobs, and the paper's promise: experts together cost as much as the monolith, the router a few percent.

    None for a share of what isn't trained.
    """

    jobs: list[JobCost]
    experts_flops: float
    experts_over_monolith: float | None
    router_over_experts: float | None


def training_cost(run: Run, left_out: Collection[str] = ()) -> TrainingCost:
    """Costs of the experts and of all else that is finished, but for what is left out.

    Raises MissingArtifact for an expert that isn't finished, DriftError.
    """
    jobs = {artifact: _job(run.require(artifact)) for artifact in run.experts}
    experts_flops = sum(job.flops for job in jobs.values())
    for artifact in trained_of(run.config)[len(jobs) :]:
        if artifact not in left_out and (manifest := run.finished(artifact)):
            jobs[artifact] = _job(manifest)
    monolith, router = jobs.get(MONOLITH), jobs.get(ROUTER)
    return TrainingCost(
        jobs=list(jobs.values()),
        experts_flops=experts_flops,
        experts_over_monolith=experts_flops / monolith.flops if monolith else None,
        router_over_experts=router.flops / experts_flops if router else None,
    )


def _job(manifest: Manifest) -> JobCost:
    info = TrainedInfo.of(manifest)
    return JobCost(
        job=manifest.artifact,
        parameters=info.parameters,
        steps=info.step,
        rows_seen=info.rows_seen,
        flops=info.training_flops,
        seconds=info.seconds,
        attempts=info.attempts,
        loss=info.loss,
    )
