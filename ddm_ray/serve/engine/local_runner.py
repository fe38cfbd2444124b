"""Engines of this process with the networks of a version, warm and running, and their runners. No Ray, no HTTP.

Shapes: B rows, CHW image, K experts.
"""

import asyncio
from functools import partial

import numpy as np
import torch

from ddm_ray.config import DataConfig, SamplingSettings
from ddm_ray.sampling import driver
from ddm_ray.sampling.offload import OffloadedToHost
from ddm_ray.sampling.request import MixtureInfo, SampleRequest
from ddm_ray.sampling.state import Trajectories
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.engine.batch_engine import BatchEngine
from ddm_ray.serve.engine.computing import Networks, any_condition, expert_costs
from ddm_ray.serve.engine.multiplexer import Multiplexer
from ddm_ray.serve.engine.runner import Runners, Segment
from ddm_ray.serve.engine.scheduler import Scheduler
from ddm_ray.serve.engine.versions import Version


class LocalRunner:
    """The Runner of an engine in this process."""

    away = False

    def __init__(self, engine: BatchEngine):
        self._engine = engine

    async def run(self, rows: Trajectories, seconds: float | None, until: int | None) -> Segment:
        return await asyncio.wrap_future(self._engine.submit(rows, seconds, until))


def colocated_runners(info: MixtureInfo, version: Version, networks: Networks, data: DataConfig) -> Runners:
    """One engine with all experts of a version. Raises as `Networks.of` does."""
    engine = local_engine(info, version, list(range(info.num_experts)), networks, data)
    runner = LocalRunner(engine)
    return Runners([None if weights is None else runner for weights in version.experts], runner, engine)


def multiplexed_runners(info: MixtureInfo, version: Version, networks: Networks, data: DataConfig) -> Runners:
    """An engine for each expert of a version, which share the device. Raises as `Networks.of` does."""
    engines = multiplexed_engines(info, version, networks, data)
    pairs = zip(engines.of_expert, version.experts, strict=True)
    of_expert = [None if weights is None else LocalRunner(engine) for engine, weights in pairs]
    return Runners(of_expert, LocalRunner(engines.mixing), engines)


def local_engine(
    info: MixtureInfo, version: Version, positions: list[int], networks: Networks, data: DataConfig
) -> BatchEngine:
    """An engine with the experts of a version at these positions and its router, warm and running.

    Raises as `Networks.of` does.
    """
    torch.set_num_threads(1)
    here = [weights if position in positions else None for position, weights in enumerate(version.experts)]
    experts = networks.experts_of(here, version.run)
    router = None if version.router is None else networks.of(version.router, version.run)
    answer = partial(driver.answers, experts=experts, router=router)
    here_K = None if len(positions) == info.num_experts else np.isin(np.arange(info.num_experts), positions)
    # An engine of one expert learns the speed of that one.
    cost_K = None if len(positions) == 1 else expert_costs(version.run.config)
    engine = BatchEngine(answer, here_K, Scheduler(networks.computing.max_rows), cost_K=cost_K)
    present = [position for position in positions if experts[position] is not None]
    warm_up(engine, info, data, present, networks.computing.device)
    engine.start()
    return engine


def multiplexed_engines(info: MixtureInfo, version: Version, networks: Networks, data: DataConfig) -> Multiplexer:
    """Engines of all experts of a version, with weights in host memory and a few on the device; warm and running.

    Raises as `Networks.of` does.
    """
    torch.set_num_threads(1)
    computing, experts_K = networks.computing, version.experts
    assert computing.resident is not None
    present = [weights is not None for weights in experts_K]

    def load(position: int) -> torch.nn.Module:
        weights = experts_K[position]
        assert weights is not None
        network = networks.of(weights, version.run)
        networks.forget(weights)  # of which there is a copy from now on
        assert isinstance(network, torch.nn.Module)
        return network

    here = {
        position: networks.packed[each] for position, each in enumerate(experts_K) if each and each in networks.packed
    }
    experts = OffloadedToHost(load, present, computing.device, computing.resident, here)
    networks.packed = {each: experts.packed[position] for position, each in enumerate(experts_K) if each is not None}
    router = None if version.router is None else networks.of(version.router, version.run)
    cost_K = expert_costs(version.run.config)
    multiplexer = Multiplexer(experts, router, computing.max_rows, clusters=info.clusters, cost_K=cost_K)
    positions = [position for position, here in enumerate(present) if here]
    for first in {experts.form_of(position): position for position in reversed(positions)}.values():
        warm_up(multiplexer.of_expert[first], info, data, [first], computing.device)
    warm_up(multiplexer.mixing, info, data, positions, computing.device)
    multiplexer.start()
    return multiplexer


def warm_up(engine: BatchEngine, info: MixtureInfo, data: DataConfig, positions: list[int], device: str) -> None:
    """Run a few velocities of one row and of many, so that the engine knows its speed before the first request."""
    settings = SamplingSettings(strategy="oracle", steps=3)
    for number, count in enumerate((1, 1, engine.scheduler.max_rows)):
        if number == 1:
            engine.scheduler.speed.forget()  # what runs first is slower than it ever will be
        cluster_B = torch.tensor(positions)[torch.arange(count) % len(positions)]
        request = SampleRequest(tuple(range(count)), any_condition(data, count), settings, cluster_B)
        future = engine.submit(start(request, info, device), np.inf)
        while not future.done():
            engine.tick()
        future.result()
