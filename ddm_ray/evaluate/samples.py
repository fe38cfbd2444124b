"""Samples of every candidate as chunks on storage, so that a killed evaluation resumes; memory is bounded.

Shapes: B images of a portion, CHW image.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Self

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ddm_ray.config import RunConfig
from ddm_ray.core.condition import Condition
from ddm_ray.core.streams import SeedPurpose, consecutive_seeds
from ddm_ray.data.sharded.chunk_store import ChunkRecord, ChunkStore, StoredFile
from ddm_ray.data.sharded.serial import SideBySide
from ddm_ray.errors import CorruptArtifact
from ddm_ray.evaluate.candidates import Candidate, Lineup, decoder
from ddm_ray.evaluate.real_rows import prompts_of
from ddm_ray.jobs.published import Weights
from ddm_ray.pictures.images import to_unit
from ddm_ray.run.chunk_records import ChunkKey
from ddm_ray.run.graph import Artifact
from ddm_ray.run.manifest import Identity
from ddm_ray.sampling.request import SampleRequest

BATCH = 256


@dataclass(frozen=True)
class Portion:
    """A unit of work: consecutive images of one candidate, from the `first` on.

    `numbers`: the images' conditions, as indices into `prompts_of`. `work`: approximate rows through experts.
    """

    candidate: str
    first: int
    numbers: tuple[int, ...]
    work: int

    @property
    def key(self) -> str:
        return f"{self.candidate}, images {self.first} to {self.first + len(self.numbers) - 1}"

    @property
    def bytes(self) -> int:
        return self.work


@dataclass(frozen=True)
class Milestone:
    """Weights of a job that is still training, which an evaluation uses in place of finished ones."""

    artifact: str
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*$", max_length=200)]
    step: int

    @classmethod
    def of(cls, weights: Weights) -> Self:
        return cls(str(weights.artifact), weights.prefix, weights.step)

    @property
    def weights(self) -> Weights:
        return Weights(Artifact(self.artifact), self.prefix, self.step, final=False)


@dataclass(frozen=True)
class SamplesPlan:
    """The images of all candidates in portions, and the trained artifacts that existed when the plan was made.

    `milestones`: the weights of jobs that were still training.
    """

    units: tuple[Portion, ...]
    trained: tuple[str, ...]
    milestones: tuple[Milestone, ...] = ()

    @property
    def earlier(self) -> dict[Artifact, Weights]:
        """The milestones' weights by artifact."""
        return {each.weights.artifact: each.weights for each in self.milestones}


@dataclass(frozen=True)
class SamplesRecord(ChunkRecord):
    """A portion's images: their file, the network rows that they cost, and seconds.

    Seconds are CPU time of one core, or elapsed time on an accelerator.
    """

    candidate: str
    images: int
    expert_rows: int
    router_rows: int
    seconds: float
    device: str
    part: StoredFile


SamplesStore = ChunkStore[SamplesPlan, SamplesRecord]


def portions(candidates: Sequence[Candidate], numbers: Sequence[int]) -> tuple[Portion, ...]:
    """The images of all candidates, for the conditions `numbers`, in portions of at most BATCH images."""
    parts = [(first, tuple(numbers[first : first + BATCH])) for first in range(0, len(numbers), BATCH)]
    return tuple(
        Portion(candidate.name, first, part, candidate.cost * len(part))
        for candidate in candidates
        for first, part in parts
    )


def request_of(config: RunConfig, prompts_N: Condition, numbers: Sequence[int], first: int = 0) -> SampleRequest:
    """The request for an evaluation's images from the `first` on. It is the same for every candidate."""
    every = consecutive_seeds(config.evaluate.seed, config.evaluate.num_samples, SeedPurpose.EVALUATION)
    condition = prompts_N[torch.tensor(numbers)]
    return SampleRequest(every[first : first + len(numbers)], condition, config.sample)


@dataclass(frozen=True)
class Made:
    """A portion's images, uint8 (B, C, H, W), before they are stored, and the fields of their SamplesRecord."""

    candidate: str
    image_BCHW: Tensor
    expert_rows: int
    router_rows: int
    seconds: float
    device: str


@dataclass(frozen=True)
class MakeSamples:
    """The `ChunkMaker` of samples. `lineup`: the models, if they are in memory; other processes load their own.

    `on_share`: called in this process with the share of a portion's steps that are done.
    """

    chunks: SamplesStore
    identity: Identity
    device: str
    lineup: Lineup | None = field(default=None, repr=False)
    on_share: Callable[[Portion, float], object] | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.chunks, self.identity, self.device)

    def load(self) -> Callable[[Portion], Made]:
        """Load the models. Raises DriftError if they aren't those that the evaluation began with."""
        run = self.chunks.run
        self.chunks.require_same(self.identity)
        lineup = self.lineup
        if lineup is None:
            plan = self.chunks.begun()
            lineup = Lineup.of(run, self.identity.inputs, {}, self.device, plan.earlier if plan else {})
        candidates = {candidate.name: candidate for candidate in lineup.candidates}
        decode, prompts_N, device = (
            decoder(run, self.device),
            prompts_of(run, device=self.device),
            torch.device(self.device),
        )
        # A thread's own CPU time excludes what other portions, or other programs, take from its core.
        clock = time.thread_time if device.type == "cpu" else time.perf_counter

        def make(portion: Portion) -> Made:
            candidate, began = candidates[portion.candidate], clock()
            request = request_of(run.config, prompts_N, portion.numbers, portion.first)
            sampled = candidate.sample(request, self.on_share and partial(self.on_share, portion))
            image_BCHW = (to_unit(decode(sampled.images_BCHW)) * 255).round().byte()
            rows = sampled.num_expert_rows, sampled.num_router_rows
            return Made(portion.candidate, image_BCHW, *rows, clock() - began, device.type)

        return make

    def store(self, key: ChunkKey, made: Made) -> SamplesRecord:
        """See ChunkMaker."""
        part = self.chunks.put(key, "samples/", ".safetensors", save({"image": made.image_BCHW.contiguous()}))
        rows = made.expert_rows, made.router_rows
        return self.chunks.finish(
            SamplesRecord(key, made.candidate, len(made.image_BCHW), *rows, made.seconds, made.device, part=part)
        )


@dataclass(frozen=True)
class CandidateSamples:
    """The finished samples of one candidate, read part by part."""

    chunks: SamplesStore
    plan: SamplesPlan
    records: Sequence[SamplesRecord]
    candidate: str

    @property
    def number_M(self) -> Tensor:
        """Numbers of the images' conditions, int64 (M,). For classes these are the labels."""
        own = (unit.numbers for unit in self.plan.units if unit.candidate == self.candidate)
        return torch.tensor([number for numbers in own for number in numbers])

    def images(self) -> Iterator[Tensor]:
        """Yield parts (B, C, H, W) of images in [-1, 1], in 256 levels as in pictures. Raises CorruptArtifact."""
        shape = self.chunks.run.config.data.pixel_shape
        for record in self._own:
            name = record.part[0]
            try:
                image_BCHW = load(self.chunks.read(record, name))["image"]
            except (SafetensorError, KeyError):
                image_BCHW = torch.empty(0)
            if image_BCHW.dtype != torch.uint8 or image_BCHW.shape != (record.images, *shape):
                raise CorruptArtifact(
                    f"{self.chunks.url}/{name}: isn't {record.images} images of {shape}", self.chunks.remake(record.key)
                )
            yield image_BCHW.float() / 127.5 - 1

    def costs(self) -> dict[str, float | None]:
        """Network rows and seconds per image; seconds are None if images were made on different kinds of devices."""
        count = sum(record.images for record in self._own)
        alike = len({record.device for record in self._own}) == 1
        return {
            "expert_rows_per_image": sum(record.expert_rows for record in self._own) / count,
            "router_rows_per_image": sum(record.router_rows for record in self._own) / count,
            "seconds_per_image": sum(record.seconds for record in self._own) / count if alike else None,
        }

    @property
    def _own(self) -> list[SamplesRecord]:
        return [record for record in self.records if record.candidate == self.candidate]


def here(device: str) -> SideBySide:
    """The executor in this process: one portion per core, at most eight; one at a time on an accelerator."""
    return SideBySide(min(os.cpu_count() or 1, 8) if torch.device(device).type == "cpu" else 1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit each torch operation to one thread inside the context, and restore the number of threads after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
