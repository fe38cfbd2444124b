"""The networks that a run's configuration asks for, as the specs that `weights.build` makes them from."""

import json
from typing import Any

from ddm_ray.config import FlowConfig, NetworkConfig, RunConfig
from ddm_ray.config.networks import shape_arguments


def spec_of(config: RunConfig, kind: str, cluster: int | None = None) -> dict[str, Any]:
    """The spec of the network that an artifact of this kind is: a cluster's expert, monolith, student or router."""
    if kind == "router":
        return router_spec(config)
    if kind == "student":
        return _denoiser(config, config.student_model, config.flow)
    return denoiser_spec(config, cluster)


def denoiser_spec(config: RunConfig, cluster: int | None = None) -> dict[str, Any]:
    """The spec of a cluster's expert, or of the monolith: {"class", "config"}, and "flow" if not linear velocity."""
    model = config.expert.model if cluster is None else config.expert_of(cluster).model
    spec, adapter = _denoiser(config, model, config.flow_of(cluster)), config.expert.adapter
    if adapter is None:
        return spec
    targets = [*(adapter.targets or model.adapted_layers(config.data))]
    return {**spec, "adapter": {**adapter.model_dump(mode="json"), "targets": targets}}


def experts_by_network(config: RunConfig) -> list[tuple[dict[str, Any], list[int]]]:
    """The specs of the run's experts, each with the clusters that have such a network: one where all are alike."""
    clusters_of: dict[str, list[int]] = {}
    specs = {cluster: denoiser_spec(config, cluster) for cluster in config.partition.clusters}
    for cluster, spec in specs.items():
        clusters_of.setdefault(json.dumps(spec, sort_keys=True), []).append(cluster)
    return [(specs[clusters[0]], clusters) for clusters in clusters_of.values()]


def _denoiser(config: RunConfig, model: NetworkConfig, flow: FlowConfig) -> dict[str, Any]:
    return _spec(model.kind(), model.arguments_for(config.data), flow)


def router_spec(config: RunConfig) -> dict[str, Any]:
    """The spec of the router, as `denoiser_spec`: it sees x_t of the same path."""
    size = {"num_experts": config.partition.num_clusters, **shape_arguments(config.data)}
    return _spec("Router", size | config.router.model.model_dump(), config.flow)


def _spec(name: str, arguments: dict[str, Any], learnt: FlowConfig) -> dict[str, Any]:
    flow = {"path": learnt.path, "prediction": learnt.prediction}
    spec = {"class": name, "config": arguments}
    return spec if flow == {"path": "linear", "prediction": "velocity"} else {**spec, "flow": flow}
