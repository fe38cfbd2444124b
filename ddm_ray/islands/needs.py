"""Needs of a run's trainings: what each model takes wherever it is trained, and how much of each is left."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ddm_ray.config import RunConfig
from ddm_ray.jobs.job_files import list_jobs
from ddm_ray.jobs.status import status
from ddm_ray.models import weights
from ddm_ray.models.flops import num_parameters
from ddm_ray.models.hub import encoders_in_training
from ddm_ray.models.spec import denoiser_spec, router_spec
from ddm_ray.models.text import known_parameters
from ddm_ray.placement import TrainPlacement
from ddm_ray.run.graph import Artifact, shard, shards_of
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from ddm_ray.train.estimate import bytes_a_parameter
from ddm_ray.train.job import TrainJob, train_job

LIBRARIES_BYTES = 1.4e9
"""Memory that a training takes beside its tensors, about: of its worker, and of the controller that tends it."""


@dataclass(frozen=True)
class ModelNeeds:
    """The trainings of one kind (expert, router, monolith), all alike; `left`: share of each that isn't done, 0 to 1.

    `rows`: bytes of the rows that each trains on; None before the run is partitioned. `model` has no memory.
    """

    kind: str
    left: Mapping[Artifact, float]
    config: RunConfig
    job: TrainJob
    rows: Mapping[Artifact, int] | None
    model: nn.Module

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return num_parameters(self.model)

    def teachers_bytes(self, use_gpu: bool, teachers: int | None) -> int:
        """Bytes of the networks that a student's worker holds beside its own; 0 for other models."""
        if not self.job.asked:
            return 0
        num_experts = self.config.partition.num_clusters
        held = num_experts if teachers is None else min(teachers, num_experts)
        router = 0 if self.config.student.teacher == "label" else _parameters(router_spec(self.config))
        return (2 if use_gpu else 4) * (held * _parameters(denoiser_spec(self.config)) + router)

    @cached_property
    def text_parameters(self) -> int | None:
        """Parameters of text encoders that a worker holds, 0 without; None where this machine can't tell."""
        text = self.config.data.text
        if text is None or not encoders_in_training(self.config):
            return 0
        return known_parameters(text)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state's files: indexes and the curve come on top, and are small."""
        return 16 * self.parameters

    @property
    def weights_bytes(self) -> int:
        """Bytes of published weights, likewise."""
        return 4 * self.parameters

    def memory(self, workers: int, use_gpu: bool, teachers: int | None = None) -> list[float | None]:
        """Bytes of a worker's memory (a GPU's, or a CPU's with its copy of the state), by ZeRO stage 0 to 3.

        With those of a student's `teachers`, which are as in a placement, and of text encoders that this machine has.
        Activations, buffers of communication and libraries come on top. None for a stage that can't be.
        """
        beside = self.teachers_bytes(use_gpu, teachers) + (2 if use_gpu else 4) * (self.text_parameters or 0)
        each = bytes_a_parameter(self.job.train.precision, workers, use_gpu)
        return [None if one is None else one * self.parameters + beside for one in each]

    def memory_on_cpu(self, placement: TrainPlacement) -> float:
        """Bytes of a machine's memory that a worker on its CPU takes, but for activations, so placed."""
        sizes = self.memory(placement.workers.max, False, placement.teachers)
        return LIBRARIES_BYTES + (sizes[placement.zero_stage] or max(size for size in sizes if size))


def needs_of(run: Run, artifacts: Sequence[Artifact]) -> list[ModelNeeds]:
    """The needs of these artifacts of a run, by kind in their order; two listings, and requests for begun ones."""
    by_kind: dict[str, list[Artifact]] = {}
    for artifact in artifacts:
        by_kind.setdefault(artifact.kind, []).append(artifact)
    sizes = {f"partition/{key}": size for key, size in run.store.sizes("partition").items()}
    models: dict[str, nn.Module] = {}
    needs, files = [], list_jobs(run.store, artifacts)
    for kind, members in by_kind.items():
        left = {each: 1.0 - status(run, each, files[each]).fraction for each in members}
        job = train_job(run, members[0])
        spec = json.dumps(job.spec, sort_keys=True)
        if spec not in models:
            models[spec] = weights.build(job.spec, "meta")
        needs.append(ModelNeeds(kind, left, run.config, job, _rows(run.config, members, sizes), models[spec]))
    return needs


def _parameters(spec: dict[str, Any]) -> int:
    return num_parameters(weights.build(spec, "meta"))


def _rows(config: RunConfig, members: list[Artifact], sizes: Mapping[str, int]) -> dict[Artifact, int] | None:
    """Bytes of the rows that each of these artifacts trains on; None if a shard is missing."""
    shards = dict.fromkeys(shards_of(config), 0)
    if any(f"{each}/{NAME}" not in sizes for each in shards):
        return None
    for key, size in sizes.items():
        folder, _, name = key.rpartition("/")
        if folder in shards and name.startswith("train-"):
            shards[Artifact(folder)] += size
    return {each: sum(shards.values()) if each.cluster is None else shards[shard(each.cluster)] for each in members}
