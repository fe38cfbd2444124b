"""The networks that a run's configuration asks for, as the specs that `weights.build` makes them from."""

from typing import Any

from ddm_ray.config import NetworkConfig, RunConfig
from ddm_ray.config.networks import shape_arguments


def spec_of(config: RunConfig, kind: str) -> dict[str, Any]:
    """The spec of the network that an artifact of this kind is: expert, monolith, student or router."""
    if kind == "router":
        return router_spec(config)
    return denoiser_spec(config, config.student_model if kind == "student" else None)


def denoiser_spec(config: RunConfig, model: NetworkConfig | None = None) -> dict[str, Any]:
    """The spec of a denoiser: {"class", "config"}, and "flow" if not linear velocity. No `model`: an expert's."""
    model = model or config.expert.model
    return _spec(model.kind(), model.arguments_for(config.data), config)


def router_spec(config: RunConfig) -> dict[str, Any]:
    """The spec of the router, as `denoiser_spec`: it sees x_t of the same path."""
    size = {"num_experts": config.partition.num_clusters, **shape_arguments(config.data)}
    return _spec("Router", size | config.router.model.model_dump(), config)


def _spec(name: str, arguments: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    flow = {"path": config.flow.path, "prediction": config.flow.prediction}
    spec = {"class": name, "config": arguments}
    return spec if flow == {"path": "linear", "prediction": "velocity"} else {**spec, "flow": flow}
