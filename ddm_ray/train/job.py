"""TrainJob: what tells an expert's, the router's and the monolith's training apart: objective, model, rows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddm_ray.config import TrainConfig
from ddm_ray.core.streams import INITIAL, stream
from ddm_ray.models import weights
from ddm_ray.storage.run import MONOLITH, ROUTER, Run, shard
from ddm_ray.train.objectives import Objective, expert_loss, router_loss


@dataclass(frozen=True)
class TrainJob:
    """One training job of a run, all of it derived from `run.json`; `key` sets its random streams apart."""

    artifact: str
    key: tuple[int, ...]
    objective: Objective
    spec: dict[str, Any]
    train: TrainConfig
    batch: int
    shards: list[str]
    image_shape: tuple[int, int, int]
    null_label: int

    def build(self) -> nn.Module:
        """The model at its seeded initialisation."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(stream(self.train.seed, INITIAL, *self.key).integers(2**32)))
            return weights.build(self.spec)


def train_job(run: Run, artifact: str) -> TrainJob:
    """The job that makes `artifact` (experts/NNN, router or monolith) of this run."""
    config = run.config
    num_clusters = config.partition.num_clusters
    shape = {
        "image_size": config.data.image_size,
        "channels": config.data.channels,
        "num_classes": config.data.num_classes,
    }
    everything = [shard(cluster) for cluster in range(num_clusters)]
    rows_form = (config.data.shape, config.data.num_classes)
    if artifact == ROUTER:
        spec = {
            "class": "Router",
            "config": {"num_experts": num_clusters, **shape, **config.router.model.model_dump()},
        }
        train = config.router.train
        return TrainJob(artifact, (1,), router_loss, spec, train, train.global_batch, everything, *rows_form)
    spec = {"class": "DiT", "config": {**shape, **config.expert.model.model_dump()}}
    train = config.expert.train
    if artifact == MONOLITH:
        return TrainJob(artifact, (0,), expert_loss, spec, train, train.global_batch, everything, *rows_form)
    # Equal FLOPs: K experts take a K-th of the monolith's batch each, for as many steps (paper, section 4).
    cluster = int(artifact.removeprefix("experts/"))
    batch = train.global_batch // num_clusters
    return TrainJob(artifact, (2, cluster), expert_loss, spec, train, batch, [shard(cluster)], *rows_form)
