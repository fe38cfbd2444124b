"""Needs of a run's training jobs: memory and storage of each model on any machine, and how much is left to train."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from ddm_ray.config import DenoiserConfig, RunConfig
from ddm_ray.config.networks import SIZES
from ddm_ray.jobs.job_files import list_jobs
from ddm_ray.jobs.status import status
from ddm_ray.models import weights
from ddm_ray.models.flops import num_frozen, num_parameters
from ddm_ray.models.hub import encoders_in_training
from ddm_ray.models.spec import experts_by_network, router_spec, spec_of
from ddm_ray.models.text import known_parameters
from ddm_ray.placement import Island, TrainPlacement
from ddm_ray.run.graph import Artifact, shard, shards_of
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from ddm_ray.spelling import numbered
from ddm_ray.train.job import TrainJob, train_job

LIBRARIES_BYTES = 1.4e9
"""Approximate memory of a training job beside its tensors: that of its worker process and of its controller."""
FP32_RECORDS_BYTES, GRADIENT_BYTES = 16, 4
"""Bytes per parameter of its value, EMA and moments, and of its gradient."""


@dataclass(frozen=True)
class ModelNeeds:
    """Training jobs of one kind (expert, router, monolith) that are alike: in their network, flow and schedule.

    `name`: the kind, or where experts differ their numbers: `experts 0, 2`. `left`: unfinished share of each job, 0 to
    1. `rows`: bytes of each job's rows; None before the run is partitioned. `model` is on the meta device.
    """

    kind: str
    name: str
    left: Mapping[Artifact, float]
    config: RunConfig
    job: TrainJob
    rows: Mapping[Artifact, int] | None
    model: nn.Module

    @cached_property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return num_parameters(self.model)

    def teachers_bytes(self, use_gpu: bool, teachers: int | None) -> int:
        """Bytes of the teachers and router that a student's worker holds; 0 for other models."""
        if not self.job.asked:
            return 0
        sizes = [_parameters(spec) for spec, own in experts_by_network(self.config) for _ in own]
        held = sum(sorted(sizes, reverse=True)[:teachers])  # the largest may be there at the same time
        router = 0 if self.config.student.teacher == "label" else _parameters(router_spec(self.config))
        base = num_frozen(weights.build(spec_of(self.config, "monolith"), "meta"))
        return (2 if use_gpu else 4) * (held + router + base)

    @cached_property
    def text_parameters(self) -> int | None:
        """Parameters of a worker's text encoders; 0 if it has none, None if this machine doesn't know them."""
        text = self.config.data.text
        if text is None or not encoders_in_training(self.config):
            return 0
        return known_parameters(text)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state's files, without indexes and the loss curve, which are small."""
        return 16 * self.parameters

    @property
    def weights_bytes(self) -> int:
        """Bytes of published weights, without small files."""
        return 4 * self.parameters

    def memory(self, workers: int, use_gpu: bool, teachers: int | None = None) -> list[float | None]:
        """Bytes of a worker's memory (on a GPU, or on a CPU with its copy of the state), by ZeRO stage 0 to 3.

        They include a student's `teachers` (see TrainPlacement), an adapter's base and known text encoders, but no
        activations, communication buffers or libraries. An impossible stage gives None.
        """
        beside = self.teachers_bytes(use_gpu, teachers) + (2 if use_gpu else 4) * (self.text_parameters or 0)
        frozen = (2 if self.job.train.precision == "bf16" else 4) * num_frozen(self.model)
        each = bytes_a_parameter(self.job.train.precision, workers, use_gpu)
        # Stage 3 shards the base, too.
        bases = [frozen, frozen, frozen, frozen / workers]
        return [
            None if one is None else one * self.parameters + base + beside
            for one, base in zip(each, bases, strict=True)
        ]

    def memory_in(self, placement: TrainPlacement) -> float:
        """Bytes of memory that a worker takes in this placement, of its GPU if it has one, without activations."""
        if not placement.use_gpu:
            return self.memory_on_cpu(placement)
        sizes = self.memory(placement.workers.max, True, placement.teachers)
        return sizes[placement.zero_stage] or max(size for size in sizes if size)

    def sized(self, size: str) -> "ModelNeeds | None":
        """The needs of a DiT of this named size in the network's place; None if it's none, or is adapted."""
        if self.job.spec["class"] != DenoiserConfig.kind() or "adapter" in self.job.spec:
            return None
        named = dict(zip(("width", "depth", "heads"), SIZES[size], strict=True))
        spec = {**self.job.spec, "config": {**self.job.spec["config"], **named}}
        return replace(self, model=weights.build(spec, "meta"))

    def memory_on_cpu(self, placement: TrainPlacement) -> float:
        """Bytes of a machine's memory that a worker on its CPU takes in this placement, without activations."""
        sizes = self.memory(placement.workers.max, False, placement.teachers)
        return LIBRARIES_BYTES + (sizes[placement.zero_stage] or max(size for size in sizes if size))


def bytes_a_parameter(precision: str, workers: int, use_gpu: bool) -> list[float | None]:
    """Bytes per parameter in a worker's memory (a GPU's, or a CPU's with its copy of the state), by ZeRO stage 0 to 3.

    Activations, communication buffers and libraries are not included. An impossible stage gives None.
    """
    copy = {"bf16": 2, "fp32": 4}[precision]
    # Within the step a flat gradient, and a second one if that isn't in fp32. A CPU also holds the copy of its state.
    within = GRADIENT_BYTES + (2 if copy == 2 else 0)
    sharded = FP32_RECORDS_BYTES + within + (0 if use_gpu else FP32_RECORDS_BYTES)
    return [
        None if copy == 2 else 4 + sharded - (0 if use_gpu else FP32_RECORDS_BYTES * (1 - 1 / workers)),
        2 * copy + sharded / workers,
        copy + (copy + sharded) / workers,
        (2 * copy + sharded) / workers,
    ]


def needs_of(run: Run, artifacts: Sequence[Artifact]) -> list[ModelNeeds]:
    """The needs of these artifacts of a run, by kind and likeness in their order. Reads two listings and begun jobs."""
    jobs = {artifact: train_job(run, artifact) for artifact in artifacts}
    alike: dict[tuple[str, str], list[Artifact]] = {}
    for artifact, job in jobs.items():
        # Where it begins and which numbers it draws changes nothing of what it takes.
        train = job.train.model_dump(mode="json", exclude={"init_from", "seed"})
        alike.setdefault((artifact.kind, json.dumps([job.spec, train])), []).append(artifact)
    kinds = [kind for kind, _ in alike]
    sizes = {f"partition/{key}": size for key, size in run.store.sizes("partition").items()}
    models: dict[str, nn.Module] = {}
    needs, files = [], list_jobs(run.store, artifacts)
    for (kind, _), members in alike.items():
        clusters = [each.cluster for each in members if each.cluster is not None]
        name = numbered(kind, clusters) if kinds.count(kind) > 1 else kind
        left = {each: 1.0 - status(run, each, files[each]).fraction for each in members}
        job = jobs[members[0]]
        spec = json.dumps(job.spec, sort_keys=True)
        if spec not in models:
            models[spec] = weights.build(job.spec, "meta")
        needs.append(ModelNeeds(kind, name, left, run.config, job, _rows(run.config, members, sizes), models[spec]))
    return needs


def too_large(run: Run, artifacts: Sequence[Artifact], site: Island) -> list[Artifact]:
    """The models that need more memory than a worker of the island has; none if the island's file doesn't say."""
    if (free := site.memory) is None:
        return []
    large = {each for need in needs_of(run, artifacts) if need.memory_in(site.train) > free for each in need.left}
    return [artifact for artifact in artifacts if artifact in large]


def _parameters(spec: dict[str, Any]) -> int:
    return num_parameters(weights.build(spec, "meta"))


def _rows(config: RunConfig, members: list[Artifact], sizes: Mapping[str, int]) -> dict[Artifact, int] | None:
    """Bytes of each artifact's rows; None if a shard is missing."""
    shards = dict.fromkeys(shards_of(config), 0)
    if any(f"{each}/{NAME}" not in sizes for each in shards):
        return None
    for key, size in sizes.items():
        folder, _, name = key.rpartition("/")
        if folder in shards and name.startswith("train-"):
            shards[Artifact(folder)] += size
    return {each: sum(shards.values()) if each.cluster is None else shards[shard(each.cluster)] for each in members}
