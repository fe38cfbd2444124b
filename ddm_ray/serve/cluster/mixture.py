"""A mixture as the ingress serves it: its newest weights, with runners in this process or in deployments."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from ddm_ray.config import DataConfig
from ddm_ray.jobs.published import Weights
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.serve.cluster.remote_runner import RemoteRunner, answer_from, call_deployment
from ddm_ray.serve.cluster.replicas import Replicas
from ddm_ray.serve.engine.batch_engine import BatchEngine
from ddm_ray.serve.engine.computing import Networks
from ddm_ray.serve.engine.engine_thread import EngineThread
from ddm_ray.serve.engine.live_sampler import LiveSampler, follow
from ddm_ray.serve.engine.local_runner import LocalRunner, colocated_runners, multiplexed_runners
from ddm_ray.serve.engine.runner import Runners
from ddm_ray.serve.engine.scheduler import Scheduler
from ddm_ray.serve.engine.segments import SegmentSampler
from ddm_ray.serve.engine.versions import LOG, Version, Versions
from ddm_ray.serve.http.meters import Meters

Handle = DeploymentHandle[Any]
LOAD_S = 900.0
"""Seconds to wait for a replica to load weights; compiling them takes minutes."""


class ServedMixture:
    """The sampler of a run's mixture, `live`, which takes newer weights as they are published."""

    live: LiveSampler

    def __init__(
        self,
        info: MixtureInfo,
        networks: Networks,
        data: DataConfig,
        experts: Sequence[Handle],
        replicas: Replicas,
        meters: Meters,
        label: str | None = None,
    ):
        """`experts`: their deployments by cluster; none: they are here. `label`: see `Meters.segment`."""
        self._info, self._networks, self._data = info, networks, data
        self._experts, self._replicas = experts, replicas
        self._meters, self._on_segment = meters, partial(meters.segment, label=label)

    async def start(self, versions: Versions, refresh_s: float) -> None:
        """Serve the newest weights, and look for newer ones every so many seconds."""
        version = await versions.loadable(self._load_here, strict=True)
        self.live = LiveSampler(version, *await self._sampler_of(version))
        self._meters.serves(version)
        parts = (versions, self.live, self._load, self._serve, refresh_s, self._free_unused)
        self._following = asyncio.ensure_future(follow(*parts))

    async def _load_here(self, version: Version, weights: Weights) -> bool:
        if self._experts and weights in version.experts:
            return False
        await asyncio.to_thread(self._networks.of, weights)
        return True

    async def _load(self, version: Version, weights: Weights) -> bool:
        if self._experts and weights in version.experts:
            return await self._loaded_there(version, version.experts.index(weights))
        return await self._load_here(version, weights)

    async def _loaded_there(self, version: Version, expert: int) -> bool:
        """Make an expert's replica load its weights of a version; False if none runs, as after scaling to zero."""
        handle = self._experts[expert]
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
        await asyncio.gather(*(self._loaded_there(version, expert) for expert in range(len(self._experts))))
        self.live.replace(version, *await self._sampler_of(version))
        self._free_unused()
        self._meters.serves(version)
        LOG.info("serving %s", version.steps())

    def _free_unused(self) -> None:
        """Free networks of versions that aren't served any more."""
        resident = self._networks.computing.resident
        self._networks.keep(list(self.live.version) if resident is None else [self.live.version.router])

    async def _sampler_of(self, version: Version) -> tuple[SegmentSampler, EngineThread]:
        """A sampler of these weights, and its engine here."""
        runners = await self._runners(version)
        device = self._networks.computing.device
        sampler = SegmentSampler(self._info, runners.of_expert, runners.mixing, self._on_segment, device)
        return sampler, runners.engine

    async def _runners(self, version: Version) -> Runners:
        """The runners of these weights, by the placement."""
        if self._experts:
            return await self._remote_runners(version)
        place = colocated_runners if self._networks.computing.resident is None else multiplexed_runners
        return await asyncio.to_thread(place, self._info, version, self._networks, self._data)

    async def _remote_runners(self, version: Version) -> Runners:
        """A runner for each expert's replicas, and an engine here that asks them all and has the router."""
        of_expert = [
            None if weights is None else RemoteRunner(handle, expert, self._info, self._replicas, version.pair(expert))
            for expert, (handle, weights) in enumerate(zip(self._experts, version.experts, strict=True))
        ]
        router = None if version.router is None else await asyncio.to_thread(self._networks.of, version.router)
        answer = answer_from(of_expert, router, self._meters.asked)
        cost_K = await asyncio.to_thread(self._networks.cost_K) if len(of_expert) > 1 else None
        engine = BatchEngine(answer, scheduler=Scheduler(self._networks.computing.max_rows), cost_K=cost_K)
        engine.start()
        return Runners(of_expert, LocalRunner(engine), engine)
