"""A run as the application serves it: a request's settings, its model, and the sampling of its images. No Ray.

Shapes: CHW image.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ddm_ray.config import RunConfig
from ddm_ray.core.condition import Text
from ddm_ray.core.names import parse_strategy_name
from ddm_ray.sampling.request import SampleResult
from ddm_ray.serve.engine.live_sampler import LiveSampler
from ddm_ray.serve.engine.runner import DeadlineError
from ddm_ray.serve.engine.segments import OnStop, Sampled
from ddm_ray.serve.engine.versions import expert_name
from ddm_ray.serve.http.generation import Generation, GenerationRequest, RequestError, resolve
from ddm_ray.serve.http.meters import DENSE, Meters
from ddm_ray.spelling import one_line

CODEC_S = 60.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class ServedModel:
    """A model that requests may name. `alone`: see Generation."""

    sampler: LiveSampler
    alone: bool = False


@dataclass(frozen=True)
class Service:
    """A run as the application serves it: its mixture, of its own name, and other `models` by theirs.

    `encode` returns the condition, one row, of a text, and the text's number of tokens; `decode` makes images of
    latents; None: the run needs none. `lacking` names the deployments that have no replica. `credit`: see `Run.credit`.
    """

    config: RunConfig
    models: Mapping[str, ServedModel]
    meters: Meters
    lacking: Callable[[], Awaitable[list[str]]]
    encode: Callable[[str], Awaitable[tuple[Text, int]]] | None = None
    decode: Callable[[Tensor], Awaitable[Tensor]] | None = None
    credit: str | None = None

    def model(self, name: str | None) -> ServedModel:
        """The model of this name, the mixture for None. Raises RequestError."""
        name = self.config.name if name is None else name
        if name not in self.models:
            names = " or ".join(map(repr, self.models))
            message = f"model {one_line(repr(name), 60)} isn't served here: use {names}"
            raise RequestError(message, "model", "model_not_found", 404)
        return self.models[name]

    def resolve(self, request: GenerationRequest) -> Generation:
        """The request with default settings filled in. Raises RequestError."""
        model = self.model(request.model)
        defaults = model.sampler.defaults
        if model.sampler.version.router is None:
            defaults = defaults.changed(strategy="once")  # for labels it needs no router
        return resolve(request, self.config, defaults, model.sampler.info, model.alone)

    async def sample(self, generation: Generation, on_stop: OnStop | None = None) -> Sampled:
        """Make a request's images, in pixels; `on_stop` is called with the unfinished images."""
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

        sampler, seen = self.model(generation.model).sampler, None if on_stop is None else decoded
        sampled = replace(await sampler.sample(request, seconds, generation.stops, seen), cut=cut)
        if decode is not None:
            left = None if generation.seconds is None else generation.seconds - (time.monotonic() - began)
            pixels_BCHW = await _in_time(decode(sampled.result.images_BCHW), left)
            sampled = replace(sampled, result=replace(sampled.result, images_BCHW=pixels_BCHW))
        # By its kind: names have numbers that clients choose, so their count has no bound.
        strategy = DENSE if generation.alone else parse_strategy_name(request.settings.strategy_or_once)[0]
        self.meters.images.labels(strategy).inc(len(request.seeds))
        self.meters.seconds.labels(strategy).observe(time.monotonic() - began)
        for expert, steps in enumerate(torch.bincount(sampled.result.experts_SB.flatten()).tolist()):
            if steps and not generation.alone:
                self.meters.steps.labels(expert_name(sampled.result.clusters[expert])).inc(steps)
        for number in sampled.away_numbers:
            self.meters.degraded.labels(expert_name(number)).inc()
        return sampled


async def _in_time(work: Awaitable[Result], seconds: float | None) -> Result:
    """The result of encoding or decoding. DeadlineError after these seconds, or CODEC_S."""
    try:
        async with asyncio.timeout(CODEC_S if seconds is None else max(0.0, seconds)):
            return await work
    except TimeoutError:
        raise DeadlineError("out of time, waiting for the text encoder or the autoencoder") from None
