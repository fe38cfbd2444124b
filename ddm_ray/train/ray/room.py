"""Room for training jobs in the connected Ray cluster: resources asked for, free ones, and missing ones."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.util import placement_group_table

from ddm_ray.cores import busy_words
from ddm_ray.errors import RayAway, RayError
from ddm_ray.placement import PREDEFINED, TrainPlacement

NODE_GROUP = "ray.io/node-group"


def has_room(placement: TrainPlacement, running: Sequence[TrainPlacement], resources: Mapping[str, float]) -> bool:
    """True if a job placed so fits into a cluster of these resources beside the running ones, or runs alone."""
    asked = [(each.workers.min * amount, name) for each in (*running, placement) for name, amount in each.asked.items()]
    taken = {name: sum(amount for amount, other in asked if other == name) for name in placement.asked}
    return not running or all(amount <= resources.get(name, 0) + 1e-6 for name, amount in taken.items())


def room(placement: TrainPlacement) -> str:
    """Words on the resources that are asked for, and those that are free now."""
    if is_free(placement):
        return f"there is room for it, and Ray is still starting it{busy_words()}"
    asked, free = placement.asked, ray.available_resources()
    return f"it asks for {placement.workers.min} x ({amounts(asked)}), free are {amounts(free, asked)}"


def is_free(placement: TrainPlacement) -> bool:
    """True if the cluster has the resources of the placement free now, on all its nodes together."""
    free = ray.available_resources()
    return all(free.get(name, 0) >= placement.workers.min * amount for name, amount in placement.asked.items())


def has_places(placement: TrainPlacement) -> bool:
    """True if the cluster has a placement group of workers like these: theirs, as they start, or others'."""
    groups = placement_group_table().values()
    return any(
        group["state"] == "CREATED" and all(bundle == placement.asked for bundle in group["bundles"].values())
        for group in groups
    )


def grows(nodes: list[dict[str, Any]]) -> bool:
    """True if an autoscaler adds machines to a cluster of these nodes.

    Ray labels most nodes that an autoscaler started. Without a label, a head alone without a CPU waits for nodes.
    """
    labelled = any(NODE_GROUP in node.get("Labels", {}) for node in nodes)
    return labelled or not any(node["Resources"].get(name) for node in nodes for name in ("CPU", "GPU"))


def places_on(node: dict[str, Any], placement: TrainPlacement) -> int:
    """Number of workers that a machine of the cluster has the resources for."""
    return int(min(node["Resources"].get(name, 0) / amount for name, amount in placement.asked.items()) + 1e-6)


def shortage(placement: TrainPlacement) -> str:
    """Text on resources that the cluster lacks, and the remedy; empty if it lacks none, or if nodes come on demand."""
    if grows([node for node in ray.nodes() if node["Alive"]]):
        return ""
    try:
        lack(placement, may_grow=False)
    except RayError as error:
        return error.text()
    return ""


def amounts(resources: Mapping[str, float], names: Collection[str] | None = None) -> str:
    """Words on the amounts of resources, of these names; memory in GB."""
    by_name = {name: resources.get(name, 0.0) for name in (resources if names is None else names)}
    memory = {name: f"{amount / 1e9:.2g} GB of memory" for name, amount in by_name.items() if name == "memory"}
    return " and ".join(memory.get(name, f"{amount:g} {name}") for name, amount in by_name.items())


def lack(placement: TrainPlacement, may_grow: bool) -> str | None:
    """Text on resources of the placement that the Ray cluster lacks now; Ray itself would wait for ever in silence.

    RayError unless nodes may still come (`may_grow`); RayAway for a custom resource that no node has: its nodes may
    come back, but more likely its name is wrong.
    """
    least = placement.workers.min
    asked = placement.asked
    resources = ray.cluster_resources()
    for name in set(placement.slices) - resources.keys():
        others = sorted(other for other in resources if other not in PREDEFINED and ":" not in other)
        known = f"has {', '.join(others)}" if others else "has none"
        raise RayAway(
            f"placement asks for {name}, which no node of the Ray cluster has (it {known}); start nodes that"
            f" have it (Ray's resources '{{\"{name}\": 1}}'), or change resources_per_worker in islands.yaml"
        )
    lacking = [name for name, amount in asked.items() if resources.get(name, 0) < amount * least]
    places = sum(places_on(node, placement) for node in ray.nodes() if node["Alive"])
    if lacking:
        name = lacking[0]
        text = f"placement asks for {least} x {asked[name]:g} {name}, Ray has {resources.get(name, 0):g}"
    elif places < least:
        text = f"placement asks for {least} workers of {amounts(asked)}, the nodes have room for {places}"
    else:
        return None
    if not may_grow:
        raise RayError(f"{text}; change workers or resources_per_worker in islands.yaml")
    return text
