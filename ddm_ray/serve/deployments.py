"""Engines for Serve: one of all experts, or one expert's as a deployment, whose calls any replica can repeat.

Shapes: B rows, CHW image, K experts.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial

import numpy as np
import torch
from ray.util import get_node_ip_address
from torch import Tensor

from ddm_ray.config import DataConfig, SamplingSettings
from ddm_ray.errors import ConfigError, CorruptArtifact, DDMError, DriftError
from ddm_ray.jobs.published import Weights
from ddm_ray.run.graph import ROUTER
from ddm_ray.run.run import Run
from ddm_ray.sampling import driver
from ddm_ray.sampling.offload import OffloadedToHost
from ddm_ray.sampling.packing import pack, pack_velocity, unpack, unpack_call
from ddm_ray.sampling.request import MixtureInfo, SampleRequest
from ddm_ray.sampling.run_models import ModelKind, mixture_info, monolith_info
from ddm_ray.sampling.trajectory import start
from ddm_ray.serve.computing import Computing, Networks, any_condition
from ddm_ray.serve.engine import BatchEngine
from ddm_ray.serve.multiplexed import Multiplexer
from ddm_ray.serve.scheduler import Scheduler
from ddm_ray.serve.velocities import Endpoint, VelocityServer
from ddm_ray.serve.versions import LOG, Pair, Version, Versions

KEEP_S = 60.0
"""Seconds for which weights that no request has any more stay at hand, as long as newer ones are used."""
RETRY_S = 5.0
"""Seconds after which weights that couldn't be loaded are tried again, if they are asked for."""


def local_engine(
    info: MixtureInfo, version: Version, clusters: list[int], networks: Networks, data: DataConfig
) -> BatchEngine:
    """An engine with these experts of a version and its router, warm and running. Raises as `Networks.of` does."""
    torch.set_num_threads(1)
    experts: list[driver.Field | None] = [None] * info.num_experts
    for cluster in clusters:
        weights = version.experts[cluster]
        experts[cluster] = None if weights is None else networks.of(weights)
    router = None if version.router is None else networks.of(version.router)
    answer = partial(driver.answers, experts=experts, router=router)
    here_K = None if len(clusters) == info.num_experts else np.isin(np.arange(info.num_experts), clusters)
    engine = BatchEngine(answer, here_K, Scheduler(networks.computing.max_rows))
    present = [cluster for cluster in clusters if experts[cluster] is not None]
    warm_up(engine, info, data, present, networks.computing.device)
    engine.start()
    return engine


def multiplexed_engines(info: MixtureInfo, version: Version, networks: Networks, data: DataConfig) -> Multiplexer:
    """Engines of all experts of a version, whose weights are in host memory, few on the device; warm and running.

    Raises as `Networks.of` does.
    """
    torch.set_num_threads(1)
    computing, experts_K = networks.computing, version.experts
    assert computing.resident is not None
    present = [weights is not None for weights in experts_K]

    def load(cluster: int) -> torch.nn.Module:
        weights = experts_K[cluster]
        assert weights is not None
        network = networks.of(weights)
        networks.forget(weights)  # of which there is a copy from now on
        assert isinstance(network, torch.nn.Module)
        return network

    experts = OffloadedToHost(load, present, computing.device, computing.resident)
    router = None if version.router is None else networks.of(version.router)
    multiplexer = Multiplexer(experts, router, computing.max_rows)
    clusters = [cluster for cluster, here in enumerate(present) if here]
    warm_up(multiplexer.of_expert[clusters[0]], info, data, clusters[:1], computing.device)
    warm_up(multiplexer.mixing, info, data, clusters, computing.device)
    multiplexer.start()
    return multiplexer


def warm_up(engine: BatchEngine, info: MixtureInfo, data: DataConfig, clusters: list[int], device: str) -> None:
    """Run a few velocities of one row and of many, so that the engine knows its speed before the first request."""
    settings = SamplingSettings(strategy="oracle", steps=3)
    for number, count in enumerate((1, 1, engine.scheduler.max_rows)):
        if number == 1:
            engine.scheduler.speed.forget()  # what runs first is slower than it ever will be
        cluster_B = torch.tensor(clusters)[torch.arange(count) % len(clusters)]
        request = SampleRequest(tuple(range(count)), any_condition(data, count), settings, cluster_B)
        future = engine.submit(start(request, info, device), np.inf)
        while not future.done():
            engine.tick()
        future.result()


class ExpertReplica:
    """One expert of a run and the router, in an engine for each version that requests have; or a network alone."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, run_url: str, network: int | ModelKind, computing: Computing, pin_file: str | None = None
    ):
        """Loads the newest verified weights of a network, if there are any yet: a cluster's expert, or one of EXTRAS.

        Where they can't be loaded, each call says so: Serve would start one such replica after another, and what it
        imports each time would slow down all others.
        """
        run = Run.open(run_url)
        self._data, self._device = run.config.data, computing.device
        if isinstance(network, int):
            versions, self._cluster, self._info = Versions(run, pin_file), network, mixture_info(run)
        else:
            versions, self._cluster, self._info = Versions(run, pin_file, network), 0, monolith_info(run, network)
        self._networks = Networks(run, self._info, computing)
        self._engines, self._used_at = dict[Pair, BatchEngine](), dict[Pair, float]()
        self._failed = dict[Pair, tuple[float, DDMError]]()
        self._lock = asyncio.Lock()
        self._velocities: VelocityServer | None = None

        async def load_own(version: Version, weights: Weights) -> bool:
            if weights.artifact not in (versions.experts[self._cluster], ROUTER):
                return False
            await asyncio.to_thread(self._networks.of, weights)
            return True

        try:
            version = await versions.loadable(load_own, strict=True)
            await self.load(version.pair(self._cluster))
        # Of pins, or of weights: each call says which it wants.
        except (ConfigError, CorruptArtifact, DriftError) as error:
            LOG.warning("no weights are loaded yet: %s", error)

    async def run(
        self, packed: bytes, seconds: float | None, until: int | None, weights: Pair
    ) -> tuple[bytes, np.ndarray, float]:
        """Fields of the Segment that `BatchEngine.submit` promises for packed rows, its rows packed as well.

        `weights` of the expert and of the router: those of the request's version.
        """
        engine, rows = await self._used(weights), unpack(packed, self._info, self._device)
        segment = await asyncio.wrap_future(engine.submit(rows, seconds, until))
        return pack(segment.rows), segment.needed_B, segment.waited_s

    async def velocity(self, packed: bytes, weights: Pair) -> bytes:
        """Velocity of this expert alone for a packed call (`sampling.packing`), batched with others' calls."""
        await self._engine(weights)
        return pack_velocity(await asyncio.wrap_future(self._asked(weights, packed)))

    async def link(self, weights: Pair, client_key: bytes) -> AsyncIterator[Endpoint]:
        """Endpoint where a client with this public key is answered, for as long as it asks: Serve counts it meanwhile.

        Nothing for weights that aren't at hand: a call by Serve loads them.
        """
        if weights not in self._engines:
            return
        if self._velocities is None:
            self._velocities = VelocityServer(get_node_ip_address())
        async with aclosing(self._velocities.admit(client_key, partial(self._asked, weights))) as endpoints:
            async for endpoint in endpoints:
                yield endpoint

    def _asked(self, weights: Pair, packed: bytes) -> "Future[Tensor]":
        return self._used_now(weights).ask(unpack_call(packed, self._cluster, self._info, self._device))

    async def load(self, weights: Pair) -> None:
        """Have an engine of these weights ready. Raises CorruptArtifact, DriftError."""
        if weights[0] is not None:
            await self._engine(weights)

    def check_health(self) -> None:
        """Raise ServeError if an engine has stopped: Serve puts another replica in this one's place."""
        for engine in self._engines.values():
            engine.require_running()
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Close engines of versions that no request has had for long, while others were used or loaded since."""
        newest, recent = max(self._used_at.values(), default=0.0), list(self._engines)[-2:]
        for weights, engine in list(self._engines.items()):
            used_at = self._used_at.get(weights)
            unused = weights not in recent if used_at is None else used_at < newest - KEEP_S
            if unused and not engine.scheduler.rows:
                engine.close(0)
                del self._engines[weights]
                self._used_at.pop(weights, None)
        self._networks.keep([part for pair in self._engines for part in pair])

    async def _used(self, weights: Pair) -> BatchEngine:
        """The engine of a request's weights."""
        await self._engine(weights)
        return self._used_now(weights)

    def _used_now(self, weights: Pair) -> BatchEngine:
        engine = self._engines[weights]
        self._used_at[weights] = time.monotonic()
        return engine

    async def _engine(self, weights: Pair) -> BatchEngine:
        # Whoever has its engine doesn't wait for others', which may take minutes.
        if weights not in self._engines:
            async with self._lock:
                if weights not in self._engines:
                    self._engines[weights] = await self._loaded(weights)
        return self._engines[weights]

    async def _loaded(self, weights: Pair) -> BatchEngine:
        """A new engine of these weights. Raises CorruptArtifact, DriftError, for RETRY_S without another look."""
        at, error = self._failed.get(weights, (-np.inf, None))
        if error is not None and time.monotonic() - at < RETRY_S:
            raise error
        version = Version.of_pair(self._cluster, self._info.num_experts, weights)
        parts = (self._info, version, [self._cluster], self._networks, self._data)
        try:
            engine = await asyncio.to_thread(local_engine, *parts)
        except (CorruptArtifact, DriftError) as error:
            self._failed[weights] = time.monotonic(), error
            raise
        self._failed.pop(weights, None)
        return engine

    def __del__(self) -> None:
        velocities: VelocityServer | None = getattr(self, "_velocities", None)
        if velocities is not None:
            velocities.close()
        for engine in getattr(self, "_engines", {}).values():
            engine.close(1.0)
