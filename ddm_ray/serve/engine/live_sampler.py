"""A sampler that changes to other weights while it samples. No Ray, no HTTP."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ddm_ray.config import SamplingSettings
from ddm_ray.sampling.request import MixtureInfo, SampleRequest
from ddm_ray.serve.engine.engine_thread import EngineThread
from ddm_ray.serve.engine.segments import OnStop, Sampled, SegmentSampler
from ddm_ray.serve.engine.versions import LOG, Load, Version, Versions
from ddm_ray.spelling import one_line


@dataclass(eq=False)
class _Live:
    version: Version
    sampler: SegmentSampler
    engine: EngineThread
    defaults: SamplingSettings
    requests: int = 0


class LiveSampler:
    """A sampler that changes to other weights while it samples: a request keeps the version that it began with."""

    def __init__(self, version: Version, sampler: SegmentSampler, engine: EngineThread, defaults: SamplingSettings):
        """`engine`: the one of this process that the sampler needs. Once replaced, it closes after its last request.

        `defaults` of sampling: those of the version's run.
        """
        self._now = _Live(version, sampler, engine, defaults)

    @property
    def info(self) -> MixtureInfo:
        """The mixture of requests that come now."""
        return self._now.sampler.info

    @property
    def defaults(self) -> SamplingSettings:
        """Settings of requests that come now, for what they leave out."""
        return self._now.defaults

    @property
    def version(self) -> Version:
        """Weights of requests that come now. It may be set to an equal version with jobs that have ended meanwhile."""
        return self._now.version

    @version.setter
    def version(self, version: Version) -> None:
        assert version == self._now.version
        self._now.version = version

    @property
    def engine(self) -> EngineThread:
        """The engine of requests that come now."""
        return self._now.engine

    def replace(
        self, version: Version, sampler: SegmentSampler, engine: EngineThread, defaults: SamplingSettings
    ) -> None:
        """Use these for requests from now on."""
        before, self._now = self._now, _Live(version, sampler, engine, defaults)
        self._close_if_left(before)

    async def sample(
        self,
        request: SampleRequest,
        seconds: float | None = None,
        stops: Sequence[int] = (),
        on_stop: OnStop | None = None,
    ) -> Sampled:
        """Sample as `SegmentSampler.sample` does, from end to end with the version that is served now."""
        live = self._now
        live.requests += 1
        try:
            return await live.sampler.sample(request, seconds, stops, on_stop)
        finally:
            live.requests -= 1
            self._close_if_left(live)

    def _close_if_left(self, live: _Live) -> None:
        if live is not self._now and not live.requests:
            live.engine.close(0)


async def follow(
    versions: Versions,
    live: LiveSampler,
    load: Load,
    put: Callable[[Version], Awaitable[None]],
    every_s: float,
    forget: Callable[[], None] = lambda: None,
) -> None:
    """Serve newer weights as they are published, or those of another run, until all are final.

    Weights that can't be served are logged; `forget` gives back what was loaded of them, and the next look may succeed.
    """
    failed = False
    while failed or not versions.settled:
        await asyncio.sleep(every_s)
        try:
            version = await versions.loadable(load)
            if version != live.version:
                await put(version)
            live.version, failed = version, False
        # Errors of storage, of Ray, of too little memory: the weights that are served stay.
        except Exception as error:
            LOG.warning("the weights that are served stay as they are: %s", one_line(error, 500))
            forget()
            failed = True
