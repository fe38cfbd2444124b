"""The fields of the configuration that each stage reads, by their last names: they are an artifact's identity."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from ddm_ray.config import RunConfig

Reads = Callable[[RunConfig, int | None], dict[str, Any]]
"""Fields for a configuration and the cluster of the artifact, None if it is of no cluster."""


def reading(*paths: str) -> Reads:
    """Fields at these paths."""
    return lambda config, _: {path.rpartition(".")[2]: attrgetter(path)(config) for path in paths}


def of_rows(config: RunConfig, cluster: int | None) -> dict[str, Any]:
    """Fields of rows. Owners' rows have no embeddings."""
    return {"data": config.data} | ({} if config.partition.given else {"embedder": config.embedder})


def of_denoiser(config: RunConfig, cluster: int | None) -> dict[str, Any]:
    """Fields of a cluster's expert, or of the monolith."""
    job = config.monolith if cluster is None else config.expert_of(cluster)
    return {"data": config.data, "flow": config.flow_of(cluster), "expert": job}


def of_replay(config: RunConfig, cluster: int | None) -> dict[str, Any]:
    """Fields of the images that an expert samples."""
    return of_denoiser(config, cluster) | {"sample": config.sample, "replay": config.router.replay}


def of_student(config: RunConfig, cluster: int | None) -> dict[str, Any]:
    """Fields of the student. By default it is like the monolith, with a quarter of its batch."""
    return of_denoiser(config, None) | {"student": config.student}
