"""The networks that a run's configuration asks for, as the specs that `weights.build` makes them from."""

from typing import Any

from ddm_ray.config import DenoiserConfig, DiffusersConfig, RunConfig


def spec_of(config: RunConfig, kind: str) -> dict[str, Any]:
    """The spec of the network that an artifact of this kind is: expert, monolith, student or router."""
    if kind == "router":
        return router_spec(config)
    return denoiser_spec(config, config.student_model if kind == "student" else None)


def denoiser_spec(config: RunConfig, model: DenoiserConfig | DiffusersConfig | None = None) -> dict[str, Any]:
    """The spec of a denoiser: {"class", "config"}, and "flow" if not linear velocity. No `model`: an expert's."""
    model = model or config.expert.model
    if isinstance(model, DiffusersConfig):
        arguments = {**model.arguments, **model.shape_arguments(config.data)}
        return _spec("DiffusersTransformer", {"name": model.name, "arguments": arguments}, config)
    return _spec("DiT", {**_shape(config), **model.model_dump()}, config)


def router_spec(config: RunConfig) -> dict[str, Any]:
    """The spec of the router, as `denoiser_spec`: it sees x_t of the same path."""
    num_experts = config.partition.num_clusters
    return _spec("Router", {"num_experts": num_experts, **_shape(config), **config.router.model.model_dump()}, config)


def _shape(config: RunConfig) -> dict[str, Any]:
    data = config.data
    return {
        "image_size": data.image_size,
        "channels": data.channels,
        "num_classes": data.num_classes,
        "text_dim": None if data.text is None else data.text.dim,
    }


def _spec(name: str, arguments: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    flow = {"path": config.flow.path, "prediction": config.flow.prediction}
    spec = {"class": name, "config": arguments}
    return spec if flow == {"path": "linear", "prediction": "velocity"} else {**spec, "flow": flow}
