"""A mixture as the ingress serves it: by an engine of its own or those of deployments, and by its newest weights."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle

from ddm_ray.config import DataConfig
from ddm_ray.jobs.published import Weights
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.serve.computing import Networks
from ddm_ray.serve.deployments import local_engine, multiplexed_engines
from ddm_ray.serve.engine import BatchEngine
from ddm_ray.serve.multiplexed import Multiplexer
from ddm_ray.serve.remote import OnCalls, RemoteEngine, answer_from, called
from ddm_ray.serve.replicas import Replicas
from ddm_ray.serve.scheduler import Scheduler
from ddm_ray.serve.segments import LocalEngine, OnSegment, SegmentSampler
from ddm_ray.serve.versions import LOG, LiveSampler, Version, Versions, follow

Handle = DeploymentHandle[Any]
LOAD_S = 900.0
"""Seconds after which nobody waits any more for a replica to load weights; compiling them takes minutes."""


class ServedMixture:
    """The sampler of a run's mixture, `live`, with newer weights as they are published."""

    live: LiveSampler

    def __init__(
        self,
        info: MixtureInfo,
        networks: Networks,
        data: DataConfig,
        experts: Sequence[Handle],
        replicas: Replicas,
        on_segment: OnSegment,
        on_calls: OnCalls,
        on_version: Callable[[Version], None],
    ):
        """`experts`: their deployments by cluster; none: they are here. `on_version` learns what is served from now."""
        self._info, self._networks, self._data = info, networks, data
        self._experts, self._replicas = experts, replicas
        self._on_segment, self._on_calls, self._on_version = on_segment, on_calls, on_version

    async def start(self, versions: Versions, refresh_s: float) -> None:
        """Serve the newest weights, and look for newer ones every so many seconds."""
        version = await versions.loadable(self._load_here, strict=True)
        self.live = LiveSampler(version, *await self._made(version))
        self._on_version(version)
        parts = (versions, self.live, self._load, self._put, refresh_s, self._forget)
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
        """Have an expert's replica load its weights of a version; False if none runs, as one that sleeps."""
        handle = self._experts[expert]
        if not await self._replicas.running(handle.deployment_name):
            return False
        try:
            async with asyncio.timeout(LOAD_S):
                await called(handle.load, None, version.pair(expert))
        except TimeoutError:  # its replicas have gone: the next will load what they are asked for
            return False
        self._replicas.mark(handle.deployment_name, able=True)
        return True

    async def _put(self, version: Version) -> None:
        """Serve these weights from the next request on."""
        await asyncio.gather(*(self._loaded_there(version, expert) for expert in range(len(self._experts))))
        self.live.replace(version, *await self._made(version))
        self._forget()
        self._on_version(version)
        LOG.info("serving %s", version.steps())

    def _forget(self) -> None:
        """Give back networks of other versions than the one that is served."""
        resident = self._networks.computing.resident
        self._networks.keep(list(self.live.version) if resident is None else [self.live.version.router])

    async def _made(self, version: Version) -> tuple[SegmentSampler, BatchEngine | Multiplexer]:
        """A sampler of these weights, and its engine here."""
        info, runners = self._info, list[Any]()
        engine: BatchEngine | Multiplexer
        if self._networks.computing.resident is not None:
            engine = await asyncio.to_thread(multiplexed_engines, info, version, self._networks, self._data)
            mixing = LocalEngine(engine.mixing)
            pairs = zip(engine.of_expert, version.experts, strict=True)
            runners = [None if weights is None else LocalEngine(own) for own, weights in pairs]
        elif not self._experts:
            parts = (info, version, list(range(info.num_experts)), self._networks, self._data)
            engine = await asyncio.to_thread(local_engine, *parts)
            mixing = LocalEngine(engine)
            runners = [None if weights is None else mixing for weights in version.experts]
        else:
            for expert, handle in enumerate(self._experts):
                runner = RemoteEngine(handle, expert, info, self._replicas, version.pair(expert))
                runners.append(None if version.experts[expert] is None else runner)
            router = None if version.router is None else await asyncio.to_thread(self._networks.of, version.router)
            scheduler = Scheduler(self._networks.computing.max_rows)
            engine = BatchEngine(answer_from(runners, router, self._on_calls), scheduler=scheduler)
            engine.start()
            mixing = LocalEngine(engine)
        return SegmentSampler(info, runners, mixing, self._on_segment, self._networks.computing.device), engine
