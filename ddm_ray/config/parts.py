"""The parts of a configuration that are trained, each with a schedule of its own."""

from typing import Literal

from ddm_ray.config.run import RunConfig
from ddm_ray.config.training import TrainConfig

Part = Literal["expert", "router", "student"]
"""A part of the configuration with a schedule of its own; the monolith has the experts'."""


def train_of(config: RunConfig, part: Part, cluster: int | None = None) -> TrainConfig:
    """The schedule of a part; of a cluster's expert, with its own changes."""
    if part == "student":
        return config.student_train
    job = config.expert_of(cluster) if cluster is not None else getattr(config, part)
    return job.train  # type: ignore[no-any-return]
