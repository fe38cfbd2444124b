"""Costs of training: of finished jobs by their manifests, of others up to a milestone."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ddm_ray.jobs.published import Weights
from ddm_ray.models.flops import num_parameters
from ddm_ray.models.weights import build
from ddm_ray.run.graph import MONOLITH, ROUTER, Artifact, trained_of
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import Run
from ddm_ray.train.job import train_job


@dataclass(frozen=True)
class JobCost:
    """One training job. `flops`: forward and backward of all rows seen. `seconds`: wall time of its training loop.

    A field is None if a job reports it only when it finishes.
    """

    job: str
    parameters: int
    steps: int
    rows_seen: int
    flops: float
    seconds: float | None
    attempts: int | None
    loss: float | None


@dataclass(frozen=True)
class TrainingCost:
    """All jobs, and the paper's claim: all experts together cost what the monolith costs, the router a few percent.

    A ratio is None if its model isn't trained.
    """

    jobs: list[JobCost]
    experts_flops: float
    experts_over_monolith: float | None
    router_over_experts: float | None


def training_cost(run: Run, left_out: Collection[str], milestones: Mapping[Artifact, Weights]) -> TrainingCost:
    """Costs of the experts, and of every other job that is finished or has a milestone, except those in `left_out`.

    Raises MissingArtifact for an expert that has neither, DriftError.
    """
    jobs: dict[Artifact, JobCost] = {}
    for artifact in trained_of(run.config):
        if artifact in milestones:
            jobs[artifact] = _begun(run, milestones[artifact])
        elif artifact.kind == "expert":
            jobs[artifact] = _job(run.require(artifact))
        elif artifact not in left_out and (manifest := run.finished(artifact, accepted=True)):
            jobs[artifact] = _job(manifest)
    experts_flops = sum(job.flops for artifact, job in jobs.items() if artifact.kind == "expert")
    monolith, router = jobs.get(MONOLITH), jobs.get(ROUTER)
    return TrainingCost(
        jobs=list(jobs.values()),
        experts_flops=experts_flops,
        experts_over_monolith=experts_flops / monolith.flops if monolith else None,
        router_over_experts=router.flops / experts_flops if router else None,
    )


def _begun(run: Run, weights: Weights) -> JobCost:
    """The cost of a job up to a milestone."""
    job = train_job(run, weights.artifact)
    size = num_parameters(build(job.spec, "meta"))
    steps, flops = weights.step, float(job.training_flops(weights.step))
    return JobCost(weights.artifact, size, steps, steps * job.batch, flops, None, None, None)


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
