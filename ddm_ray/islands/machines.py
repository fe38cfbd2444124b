"""The checks of `checks.py` on each machine of the Ray cluster that this process has joined."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ddm_ray.islands.checks import Machine, check
from ddm_ray.spelling import one_line
from ddm_ray.train.ray.room import places_on

SECONDS = 60.0
"""Longest time for a machine's answer. The machine starts a process for it."""


def check_machines(machine: Machine) -> Iterator[tuple[str, dict[str, str]]]:
    """Name and check results of each machine that has room for a worker, or of all machines if none has."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    places = [places_on(node, machine.placement) for node in nodes]
    least, most = machine.placement.workers.min, machine.placement.workers.max
    machine = replace(machine, in_ray=True, workers=max(least, min(most, sum(places))))
    checked: Any = ray.remote(check)
    asked = {
        checked.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            # The check requests no GPU, and should see all of them.
            runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}},
        ).remote(replace(machine, here=min(here, machine.workers))): node["NodeManagerHostname"]
        for node, here in zip(nodes, places, strict=True)
        if here or not any(places)
    }
    ray.wait([*asked], num_returns=len(asked), timeout=SECONDS)
    for answer, name in asked.items():
        try:
            yield name, ray.get(answer, timeout=0)
        except ray.exceptions.RayError as error:
            yield name, {"machine": f"no answer: {one_line(error, 300, tail=True)}; start its Ray again"}
