"""Needs of a run's trainings: what each model takes wherever it is trained, and how much of each is left."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from ddm_ray.config import RunConfig
from ddm_ray.islands.traffic import RowBytes
from ddm_ray.models import weights
from ddm_ray.models.flops import num_parameters
from ddm_ray.models.hub import encoders_in_training
from ddm_ray.models.spec import denoiser_spec, router_spec
from ddm_ray.models.text import known_parameters
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.graph import Artifact, shards_of
from ddm_ray.storage.job_files import list_jobs
from ddm_ray.storage.manifest import NAME
from ddm_ray.storage.run import Run
from ddm_ray.storage.status import status
from ddm_ray.train.estimate import bytes_a_parameter
from ddm_ray.train.heldout import Schedule
from ddm_ray.train.job import TrainJob, train_job
from ddm_ray.train.sizes import FileSizes

LIBRARIES_BYTES = 1.4e9
"""Memory that a training takes beside its tensors, about: of its worker, and of the controller that tends it."""


@dataclass(frozen=True)
class ModelNeeds:
    """The trainings of one kind (expert, router, monolith), all alike; `left`: share of each that isn't done, 0 to 1.

    `rows`: what one of them reads, on the average; None before the run is partitioned. `model` has no memory.
    """

    kind: str
    left: Mapping[Artifact, float]
    config: RunConfig
    job: TrainJob
    rows: RowBytes | None
    model: nn.Module
    _sizes: dict[tuple[int, int, int], FileSizes] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return num_parameters(self.model)

    @cached_property
    def flops(self) -> int:
        """FLOPs of one whole training, with those of its teachers."""
        return self.job.training_flops(self.job.train.steps)

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

    def sizes(self, placement: TrainPlacement | None = None) -> FileSizes:
        """Sizes of the files of one training; by default of one worker's."""
        placement = placement or TrainPlacement()
        how = placement.workers.max, placement.zero_stage, placement.heldout_rows
        if how not in self._sizes:
            measured = self.config.data.heldout > 0 if self.rows is None else self.rows.heldout > 0
            heldout = Schedule.of(self.job, placement) if measured else None
            self._sizes[how] = FileSizes(self.config, self.job, self.model, *how[:2], heldout)
        return self._sizes[how]

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of a state at the end of a training by one worker; others add little."""
        return sum(self.sizes().state(self.job.train.steps).values())

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of published weights and what goes with them, but for a picture."""
        return sum(self.sizes().published(self.job.train.steps).values())

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


def _rows(config: RunConfig, members: list[Artifact], sizes: Mapping[str, int]) -> RowBytes | None:
    """Bytes that one of these artifacts reads on the average; None if a shard is missing."""
    shards = shards_of(config)
    if any(f"{shard}/{NAME}" not in sizes for shard in shards):
        return None
    rows = sum(size for key, size in sizes.items() if key.rpartition("/")[2].startswith("train-"))
    # A few rows are read, of each shard's first file.
    heldout = sum(size for key, size in sizes.items() if key.endswith("/heldout-00000.parquet"))
    manifests = sum(sizes[f"{shard}/{NAME}"] for shard in shards)
    if members[0].kind == "expert":
        rows, heldout, manifests = (each // len(shards) for each in (rows, heldout, manifests))
    return RowBytes(rows, manifests, heldout)
