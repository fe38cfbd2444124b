"""One expert of a run, or a dense network, as a Serve deployment. A call carries its rows: any replica can repeat it.

Shapes: B rows, CHW image, K experts.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import numpy as np
from ray.util import get_node_ip_address
from torch import Tensor

from ddm_ray.errors import ConfigError, CorruptArtifact, DDMError, DriftError
from ddm_ray.jobs.published import Weights
from ddm_ray.run.run import Run
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.sampling.run_models import ModelKind, mixture_info, monolith_info
from ddm_ray.sampling.serialization import pack, pack_velocity, unpack, unpack_call
from ddm_ray.serve.cluster.velocities import Endpoint, VelocityServer
from ddm_ray.serve.engine.batch_engine import BatchEngine
from ddm_ray.serve.engine.computing import Computing, Networks
from ddm_ray.serve.engine.local_runner import local_engine
from ddm_ray.serve.engine.versions import LOG, Pair, Version, Versions

KEEP_S = 60.0
"""Seconds for which weights without requests stay loaded while newer ones are in use."""
RETRY_S = 5.0
"""Seconds after a failure to load weights before the next try."""


@dataclass(frozen=True)
class _Place:
    """A run, what is known of its mixture, and the position of this replica's expert in it."""

    run: Run
    info: MixtureInfo
    expert: int

    @classmethod
    def of(cls, run: Run, network: int | ModelKind) -> "_Place":
        if isinstance(network, int):
            return cls(run, mixture_info(run), run.config.partition.position(network))
        return cls(run, monolith_info(run, network), 0)


class ExpertReplica:
    """A cluster's expert and the router, or a dense network, in an engine for each version that requests use.

    A call names its version, which may be of another run with this cluster than the one that the replica began with.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, run_url: str, network: int | ModelKind, computing: Computing, pin_file: str | None = None
    ):
        """Load the newest verified weights of a network, if there are any yet: a cluster's expert, or one of EXTRAS.

        If they can't be loaded, each call raises the error instead: Serve would start one such replica after another,
        and its imports would slow down all others each time.
        """
        run = Run.open(run_url)
        self._data, self._device, self._network = run.config.data, computing.device, network
        self._places = {run.url: _Place.of(run, network)}
        self._networks = Networks(run.config.data, self._places[run.url].info, computing)
        self._engines, self._used_at = dict[Pair, BatchEngine](), dict[Pair, float]()
        self._failed = dict[Pair, tuple[float, DDMError]]()
        self._lock = asyncio.Lock()
        self._velocities: VelocityServer | None = None

        def own_pair(version: Version) -> Pair:
            if isinstance(network, int) and network not in version.clusters:  # of another run, without this cluster
                return Pair(None, None, version.run.url)
            return version.pair(version.clusters.index(network) if isinstance(network, int) else 0)

        async def load_own(version: Version, weights: Weights) -> bool:
            if weights not in own_pair(version):
                return False
            await asyncio.to_thread(self._networks.of, weights, version.run)
            return True

        try:
            versions = Versions(run, pin_file, None if isinstance(network, int) else network)
            version = await versions.loadable(load_own, strict=True)
            await self.load(own_pair(version))
        # Wrong pins or damaged weights don't stop the replica: each call names the weights that it needs.
        except (ConfigError, CorruptArtifact, DriftError) as error:
            LOG.warning("no weights are loaded yet: %s", error)

    async def run(
        self, packed: bytes, seconds: float | None, until: int | None, weights: Pair
    ) -> tuple[bytes, np.ndarray, float]:
        """Run packed rows for a segment, as `Runner.run`. Returns the fields of the Segment, its rows packed as well.

        `weights` of the expert and of the router, of the request's version.
        """
        engine, info = await self._used(weights), self._places[weights.run].info
        rows = unpack(packed, info, self._device)
        segment = await asyncio.wrap_future(engine.submit(rows, seconds, until))
        return pack(segment.rows), segment.needed_B, segment.waited_s

    async def velocity(self, packed: bytes, weights: Pair) -> bytes:
        """Velocity of this expert for a packed call (`sampling.serialization`), in one batch with calls of others."""
        await self._engine(weights)
        return pack_velocity(await asyncio.wrap_future(self._asked(weights, packed)))

    async def link(self, weights: Pair, client_key: bytes) -> AsyncIterator[Endpoint]:
        """Yield the endpoint for a client with this public key, and stay open while it asks: so Serve counts its load.

        Yields nothing for weights that aren't loaded: a call by Serve loads them.
        """
        if weights not in self._engines:
            return
        if self._velocities is None:
            self._velocities = VelocityServer(get_node_ip_address())
        async with aclosing(self._velocities.admit(client_key, partial(self._asked, weights))) as endpoints:
            async for endpoint in endpoints:
                yield endpoint

    def _asked(self, weights: Pair, packed: bytes) -> "Future[Tensor]":
        place = self._places[weights.run]
        return self._used_now(weights).ask(unpack_call(packed, place.expert, place.info, self._device))

    async def load(self, weights: Pair) -> None:
        """Make an engine of these weights ready. Raises CorruptArtifact, DriftError."""
        if weights.expert is not None:
            await self._engine(weights)

    def check_health(self) -> None:
        """Raise ServeError if an engine has stopped: Serve puts another replica in this one's place."""
        for engine in self._engines.values():
            engine.require_running()
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Close engines of versions that had no request for long while others were used or loaded."""
        newest, recent = max(self._used_at.values(), default=0.0), list(self._engines)[-2:]
        for weights, engine in list(self._engines.items()):
            used_at = self._used_at.get(weights)
            unused = weights not in recent if used_at is None else used_at < newest - KEEP_S
            if unused and not engine.scheduler.rows:
                engine.close(0)
                del self._engines[weights]
                self._used_at.pop(weights, None)
        self._networks.keep([part for pair in self._engines for part in (pair.expert, pair.router)])

    async def _used(self, weights: Pair) -> BatchEngine:
        """The engine of a request's weights."""
        await self._engine(weights)
        return self._used_now(weights)

    def _used_now(self, weights: Pair) -> BatchEngine:
        engine = self._engines[weights]
        self._used_at[weights] = time.monotonic()
        return engine

    async def _engine(self, weights: Pair) -> BatchEngine:
        # Without the lock if the engine is there: a load of others' may take minutes.
        if weights not in self._engines:
            async with self._lock:
                if weights not in self._engines:
                    self._engines[weights] = await self._loaded(weights)
        return self._engines[weights]

    async def _loaded(self, weights: Pair) -> BatchEngine:
        """A new engine of these weights. Raises CorruptArtifact, DriftError; for RETRY_S the same without a new try."""
        at, error = self._failed.get(weights, (-np.inf, None))
        if error is not None and time.monotonic() - at < RETRY_S:
            raise error
        try:
            engine = await asyncio.to_thread(self._engine_of, weights)
        except (CorruptArtifact, DriftError) as error:
            self._failed[weights] = time.monotonic(), error
            raise
        self._failed.pop(weights, None)
        return engine

    def _engine_of(self, weights: Pair) -> BatchEngine:
        place = self._places.get(weights.run) or _Place.of(Run.open(weights.run), self._network)
        self._places[weights.run] = place
        version = Version.of_pair(place.run, place.expert, place.info.num_experts, weights)
        return local_engine(place.info, version, [place.expert], self._networks, self._data)

    def __del__(self) -> None:
        velocities: VelocityServer | None = getattr(self, "_velocities", None)
        if velocities is not None:
            velocities.close()
        for engine in getattr(self, "_engines", {}).values():
            engine.close(1.0)
