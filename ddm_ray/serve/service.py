"""A run as the application serves it: what a request becomes, and who makes its images. No Ray, no HTTP.

Shapes: CHW image.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddm_ray.config import RunConfig, SamplingSettings
from ddm_ray.core.condition import Text
from ddm_ray.core.names import parse_strategy_name
from ddm_ray.sampling.request import SampleRequest, SampleResult
from ddm_ray.serve.answers import expert_name
from ddm_ray.serve.engine import DeadlineError, ExpertError
from ddm_ray.serve.generation import DENSE, EXPERTS, Generation, GenerationRequest, resolve
from ddm_ray.serve.meters import Meters
from ddm_ray.serve.scheduler import OverloadedError
from ddm_ray.serve.segments import OnStop, Sampled
from ddm_ray.serve.versions import LiveSampler

CODEC_S = 60.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class Service:
    """A run as the application serves it; `defaults` of sampling where a request says nothing.

    `encode` makes a condition, one row, of a text, and counts the text's tokens, and `decode` makes images of latents;
    None where the run has none. `lacking` names the deployments that have no replica. `dense` samples what the experts
    have no time for.
    """

    sampler: LiveSampler
    config: RunConfig
    defaults: SamplingSettings
    meters: Meters
    lacking: Callable[[], Awaitable[list[str]]]
    encode: Callable[[str], Awaitable[tuple[Text, int]]] | None = None
    decode: Callable[[Tensor], Awaitable[Tensor]] | None = None
    dense: LiveSampler | None = None

    def resolve(self, request: GenerationRequest) -> Generation:
        """The request with default settings filled in. Raises RequestError."""
        defaults = self.defaults
        if self.sampler.version.router is None:
            defaults = defaults.changed(strategy="once")  # which needs none
        return resolve(request, self.config, defaults, self.sampler.info, self.dense_network)

    @property
    def dense_network(self) -> str | None:
        """The network of the dense tier: one of EXTRAS."""
        return None if self.dense is None else next(iter(self.dense.version.steps()))

    async def sample(self, generation: Generation, on_stop: OnStop | None = None) -> Sampled:
        """Make a request's images, in pixels; `on_stop` is called with what they are on their way."""
        began, request, decode, seconds = time.monotonic(), generation.sample, self.decode, generation.seconds
        cut = None
        if generation.prompt is not None:
            assert self.encode is not None
            text, num_tokens = await _in_time(self.encode(generation.prompt), seconds)
            kept = int(text.mask_BL.sum())
            cut = (kept, num_tokens) if kept < num_tokens else None
            seconds = None if seconds is None else seconds - (time.monotonic() - began)
            request = replace(request, condition=text[torch.zeros(len(request.seeds), dtype=torch.int64)])

        async def decoded(foreseen: SampleResult) -> None:
            assert on_stop is not None
            images_BCHW = foreseen.images_BCHW
            await on_stop(foreseen if decode is None else replace(foreseen, images_BCHW=await decode(images_BCHW)))

        sampled = await self._sampled(generation, request, seconds, None if on_stop is None else decoded)
        sampled = replace(sampled, cut=cut)
        if decode is not None:
            left = None if generation.seconds is None else generation.seconds - (time.monotonic() - began)
            pixels_BCHW = await _in_time(decode(sampled.result.images_BCHW), left)
            sampled = replace(sampled, result=replace(sampled.result, images_BCHW=pixels_BCHW))
        # By its kind: names carry numbers of the clients' own.
        strategy = DENSE if sampled.dense else parse_strategy_name(request.settings.strategy_or_once)[0]
        self.meters.images.labels(strategy).inc(len(request.seeds))
        self.meters.seconds.labels(strategy).observe(time.monotonic() - began)
        for expert, steps in enumerate(torch.bincount(sampled.result.experts_SB.flatten()).tolist()):
            if steps and not sampled.dense:
                self.meters.steps.labels(expert_name(expert)).inc(steps)
        for expert in sampled.away:
            self.meters.degraded.labels(expert_name(expert)).inc()
        return sampled

    async def _sampled(
        self, generation: Generation, request: SampleRequest, seconds: float | None, on_stop: OnStop | None
    ) -> Sampled:
        """The request's images by the first of its tiers that has the time and an expert."""
        began, seen = time.monotonic(), False

        async def noted(foreseen: SampleResult) -> None:
            nonlocal seen
            assert on_stop is not None
            seen = True
            await on_stop(foreseen)

        if EXPERTS in generation.tiers:
            try:
                return await self.sampler.sample(request, seconds, generation.stops, noted if on_stop else None)
            except (OverloadedError, ExpertError):
                # Who has seen the image on its way doesn't want another's end.
                if DENSE not in generation.tiers or seen:
                    raise
        assert self.dense is not None
        assert self.dense_network is not None
        seconds = None if seconds is None else seconds - (time.monotonic() - began)
        changes: dict[str, Any] = {"strategy": "once"}
        if self.dense_network == "student" and self.config.student.guided:
            changes["guidance_scale"] = 1.0  # its teacher was guided
        sampled = await self.dense.sample(request.changed(**changes), seconds, generation.stops, on_stop)
        return replace(sampled, dense=self.dense_network)


async def _in_time(work: Awaitable[Result], seconds: float | None) -> Result:
    """The result of encoding or decoding. DeadlineError after these seconds, or CODEC_S."""
    try:
        async with asyncio.timeout(CODEC_S if seconds is None else max(0.0, seconds)):
            return await work
    except TimeoutError:
        raise DeadlineError("out of time, waiting for the text encoder or the autoencoder") from None
