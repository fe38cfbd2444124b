"""TrainJob: the differences between the training jobs of an expert, the router, the monolith and the student."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from ddm_ray.config import RunConfig, TrainConfig
from ddm_ray.core.augmentation import Augmentation
from ddm_ray.core.flow import Flow
from ddm_ray.core.routing import parse_strategy
from ddm_ray.core.schedules import learning_rate
from ddm_ray.core.streams import INITIAL, stream
from ddm_ray.core.times import TimeSampling
from ddm_ray.errors import TrainingError
from ddm_ray.models import weights
from ddm_ray.models.adapters import adapt, trained_state
from ddm_ray.models.flops import forward_flops_per_row, training_flops_per_row
from ddm_ray.models.network import Network
from ddm_ray.models.spec import router_spec, spec_of
from ddm_ray.remedies import Begin
from ddm_ray.run import graph
from ddm_ray.run.graph import Artifact, shard
from ddm_ray.run.run import Run
from ddm_ray.train.objectives import DistillLoss, ExpertLoss, Masking, Objective, RouterLoss


@dataclass(frozen=True)
class TrainJob:
    """One training job of a run, all of it derived from `run.json`; `key` sets its random streams apart.

    Conditions are labels, with `null_label` for no condition; if that is None they are texts of `text_tokens` tokens.
    `asked`: specs of the other networks that predict rows, each with its number of predictions a row. `guided`: these
    use guidance, so that the job doesn't learn the velocity of the rows themselves.
    """

    artifact: Artifact
    key: tuple[int, ...]
    objective: Objective
    spec: dict[str, Any]
    train: TrainConfig
    shards: tuple[Artifact, ...]
    image_shape: tuple[int, int, int]
    null_label: int | None
    text_tokens: int
    flow: Flow
    times: TimeSampling
    augmentation: Augmentation
    asked: tuple[tuple[dict[str, Any], Fraction], ...] = ()
    guided: bool = False

    @property
    def batch(self) -> int:
        """Rows of a step, of all ranks together."""
        return self.train.batch

    def learning_rate(self, step: int) -> float:
        """Learning rate of step `step`, from 0."""
        train = self.train
        return learning_rate(
            step,
            schedule=train.schedule,
            base=train.learning_rate,
            final=train.final_learning_rate,
            warmup_steps=train.warmup_steps,
            steps=train.steps,
        )

    def build(self, filled: bool = True, base: Network | None = None) -> nn.Module:
        """The model at its seeded initialisation; not `filled`: see `weights.build`. `base`: gets the job's adapter."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(stream(self.train.seed, INITIAL, *self.key).integers(2**32)))
            if base is not None:
                return adapt(base, self.spec["adapter"]).train()
            return weights.build(self.spec, filled=filled)

    def masking(self, step: int) -> Masking | None:
        """Masking of step `step` (from 0); None: it trains on all tokens, as the last `unmasked_steps` do."""
        if not self.train.mask_ratio or step >= self.train.steps - self.train.unmasked_steps:
            return None
        model = self.spec["config"]
        return Masking.of((model["image_size"] // model["patch_size"]) ** 2, self.train.mask_ratio)

    def training_flops(self, steps: int) -> int:
        """FLOPs of the first `steps` steps' forward and backward passes, over the tokens that each trains on.

        The forward passes of the networks in `asked` are counted too.
        """
        full, kept = self._flops_of_a_row
        masked = 0 if self.masking(0) is None else min(steps, self.train.steps - self.train.unmasked_steps)
        return (masked * kept + (steps - masked) * full) * self.batch

    @cached_property
    def _flops_of_a_row(self) -> tuple[int, int]:
        """FLOPs of a row with all its tokens, and of one with those that masking keeps."""
        masking = self.masking(0)
        asked = int(sum(share * self._flops(spec, forward_flops_per_row) for spec, share in self.asked))
        full = self._flops(self.spec, training_flops_per_row)
        kept = full if masking is None else self._flops(self.spec, training_flops_per_row, masking.num_kept)
        return full + asked, kept + asked

    def _flops(self, spec: dict[str, Any], count: Callable[..., int], *kept: int) -> int:
        return _flops_per_row(json.dumps(spec, sort_keys=True), count, self.image_shape, self.text_tokens, *kept)


@lru_cache(maxsize=64)
def _flops_per_row(spec: str, count: Callable[..., int], *row: Any) -> int:
    """FLOPs of one row of a model by its spec as JSON; many experts are alike."""
    return count(weights.build(json.loads(spec), "meta"), *row)


def train_job(run: Run, artifact: Artifact) -> TrainJob:
    """The job that makes `artifact` (experts/NNN, router, monolith or student) of this run.

    TrainingError for a job that needs all rows in one place, if the run was given separate shards.
    """
    config = run.config
    data, text = config.data, config.data.text
    if artifact.kind == "router" and config.router.replay:
        data = data.unaugmented  # replayed images are augmented already
    if artifact not in graph.trained_of(config):
        raise TrainingError(
            f"{run.url}: no {artifact} can be trained, for rows of given shards are never pooled: sample with the"
            " strategy once, which needs no router",
            Begin(run.url, "router.replay", "N") if artifact.kind == "router" else None,
        )
    everything = graph.shards_of(config)
    learnt = config.flow_of(artifact.cluster)
    flow = Flow(learnt.path, learnt.prediction)
    times = TimeSampling(learnt.times, learnt.mean, learnt.std, learnt.num_times, learnt.shift)
    tokens, augmentation = 0 if text is None else text.tokens, Augmentation(data.horizontal_flips, data.crop_margin)
    rows_form = (data.shape, data.num_classes, tokens, flow, times, augmentation)
    spec = spec_of(config, artifact.kind, artifact.cluster)
    if artifact.kind == "router":
        train = config.router.train
        examples = graph.replays_of(config) or everything
        return TrainJob(artifact, (1,), RouterLoss(flow), spec, train, examples, *rows_form)
    if artifact.kind == "student":
        train = config.student_train
        distill = DistillLoss(flow, _patch_size(spec, train), config.student.data_weight)
        taught = (everything, *rows_form, _asked(config), config.student.guided)
        return TrainJob(artifact, (3,), distill, spec, train, *taught)
    train = (config.monolith if artifact.cluster is None else config.expert_of(artifact.cluster)).train
    loss = ExpertLoss(flow, _patch_size(spec, train))
    if artifact.kind == "monolith":
        return TrainJob(artifact, (0,), loss, spec, train, everything, *rows_form)
    assert artifact.cluster is not None
    return TrainJob(artifact, (2, artifact.cluster), loss, spec, train, (shard(artifact.cluster),), *rows_form)


def own_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the tensors of a model that aren't trained and are published with its weights; none with an adapter."""
    persistent = trained_state(model).keys()
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name in persistent}


def _patch_size(spec: dict[str, Any], train: TrainConfig) -> int | None:
    """The patch size, which the loss needs if masking leaves out tokens."""
    return spec["config"]["patch_size"] if train.mask_ratio else None


def _asked(config: RunConfig) -> tuple[tuple[dict[str, Any], Fraction], ...]:
    """The networks that a student's teacher asks, and how often about a row: the most experts, all of them alike."""
    teacher, clusters = config.student.teacher, config.partition.num_clusters
    most = 1 if teacher == "label" else parse_strategy(teacher, clusters).most(clusters)
    branches = 2 if config.student.guided else 1
    asked = [
        (spec_of(config, "expert", each), Fraction(branches * most, clusters)) for each in config.partition.clusters
    ]
    return tuple(asked if teacher == "label" else [*asked, (router_spec(config), Fraction(branches))])
