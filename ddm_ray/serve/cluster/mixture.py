"""A mixture as the ingress serves it: a version of its weights, with runners in this process or in deployments."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from ddm_ray.config import DataConfig, SamplingSettings
from ddm_ray.errors import ConfigError
from ddm_ray.jobs.published import Weights
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.serve.cluster.remote_runner import RemoteRunner, answer_from, call_deployment
from ddm_ray.serve.cluster.replicas import Replicas
from ddm_ray.serve.engine.batch_engine import BatchEngine
from ddm_ray.serve.engine.computing import Networks, expert_costs
from ddm_ray.serve.engine.engine_thread import EngineThread
from ddm_ray.serve.engine.live_sampler import LiveSampler, follow
from ddm_ray.serve.engine.local_runner import LocalRunner, colocated_runners, multiplexed_runners
from ddm_ray.serve.engine.runner import Runners
from ddm_ray.serve.engine.scheduler import Scheduler
from ddm_ray.serve.engine.segments import SegmentSampler
from ddm_ray.serve.engine.versions import LOG, Version, Versions, expert_name
from ddm_ray.serve.http.meters import DENSE, Meters

Handle = DeploymentHandle[Any]
FactsOf = Callable[[Run], tuple[MixtureInfo, SamplingSettings]]
"""Returns what a run says of its mixture, and its defaults of sampling."""
LOAD_S = 900.0
"""Seconds to wait for a replica to load weights; compiling them takes minutes."""


class ServedMixture:
    """The sampler of a run's mixture, `live`, which takes newer weights as they are published, or another run's."""

    live: LiveSampler

    def __init__(
        self,
        facts_of: FactsOf,
        networks: Networks,
        data: DataConfig,
        experts: Sequence[Handle],
        replicas: Replicas,
        meters: Meters,
        label: str | None = None,
    ):
        """`experts`: their deployments; none: they are here. `label`: see `Meters.segment`."""
        self._facts_of, self._networks, self._data = facts_of, networks, data
        self._experts, self._replicas = {each.deployment_name: each for each in experts}, replicas
        self._meters, self._on_segment = meters, partial(meters.segment, label=label)

    async def start(self, versions: Versions, refresh_s: float) -> None:
        """Serve the newest weights, and look for others every so many seconds."""
        version = await versions.loadable(self._load_here, strict=True)
        self.live = LiveSampler(version, *await self._parts_of(version))
        self._meters.serves(version)
        parts = (versions, self.live, self._load, self._serve, refresh_s, self._free_unused)
        self._following = asyncio.ensure_future(follow(*parts))

    async def _load_here(self, version: Version, weights: Weights) -> bool:
        if self._experts and weights in version.experts:
            self._handle(version, version.experts.index(weights))
            return False
        await asyncio.to_thread(self._networks.of, weights, version.run)
        return True

    async def _load(self, version: Version, weights: Weights) -> bool:
        if self._experts and weights in version.experts:
            return await self._loaded_there(version, version.experts.index(weights))
        return await self._load_here(version, weights)

    def _handle(self, version: Version, expert: int) -> Handle:
        """The deployment of a version's expert. Raises ConfigError for an expert of another run that has none."""
        name = expert_name(version.clusters[expert]) if version.clusters else DENSE
        if name not in self._experts:
            raise ConfigError(f"{name} of {version.run.url} has no deployment: name this run in Serve's configuration")
        return self._experts[name]

    async def _loaded_there(self, version: Version, expert: int) -> bool:
        """Make an expert's replica load its weights of a version; False if none runs, as after scaling to zero."""
        handle = self._handle(version, expert)
        if not await self._replicas.running(handle.deployment_name):
            return False
        try:
            async with asyncio.timeout(LOAD_S):
                await call_deployment(handle.load, None, version.pair(expert))
        except TimeoutError:  # its replicas have gone: the next will load the weights of their calls
            return False
        self._replicas.mark(handle.deployment_name, able=True)
        return True

    async def _serve(self, version: Version) -> None:
        """Serve these weights from the next request on."""
        if self._experts:
            present = [expert for expert, weights in enumerate(version.experts) if weights is not None]
            await asyncio.gather(*(self._loaded_there(version, expert) for expert in present))
        parts, before = await self._parts_of(version), self.live.version
        self.live.replace(version, *parts)
        self._free_unused()
        self._meters.serves(version, before)
        LOG.info("serving %s: %s", version.run.url, version.steps())

    def _free_unused(self) -> None:
        """Free networks of versions that aren't served any more."""
        resident = self._networks.computing.resident
        self._networks.keep(list(self.live.version) if resident is None else [self.live.version.router])

    async def _parts_of(self, version: Version) -> tuple[SegmentSampler, EngineThread, SamplingSettings]:
        """A sampler of these weights, its engine here, and the defaults of their run."""
        info, defaults = await asyncio.to_thread(self._facts_of, version.run)
        runners = await self._runners(info, version)
        device = self._networks.computing.device
        sampler = SegmentSampler(info, runners.of_expert, runners.mixing, self._on_segment, device)
        return sampler, runners.engine, defaults

    async def _runners(self, info: MixtureInfo, version: Version) -> Runners:
        """The runners of these weights, by the placement."""
        if self._experts:
            return await self._remote_runners(info, version)
        place = colocated_runners if self._networks.computing.resident is None else multiplexed_runners
        return await asyncio.to_thread(place, info, version, self._networks, self._data)

    async def _remote_runners(self, info: MixtureInfo, version: Version) -> Runners:
        """A runner for each expert's replicas, and an engine here that asks them all and has the router."""
        of_expert = [
            None
            if weights is None
            else RemoteRunner(self._handle(version, expert), expert, info, self._replicas, version.pair(expert))
            for expert, weights in enumerate(version.experts)
        ]
        router = None
        if version.router is not None:
            router = await asyncio.to_thread(self._networks.of, version.router, version.run)
        answer = answer_from(of_expert, router, self._meters.asked)
        cost_K = await asyncio.to_thread(expert_costs, version.run.config) if len(of_expert) > 1 else None
        engine = BatchEngine(answer, scheduler=Scheduler(self._networks.computing.max_rows), cost_K=cost_K)
        engine.start()
        return Runners(of_expert, LocalRunner(engine), engine)
