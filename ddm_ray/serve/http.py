"""The HTTP application: OpenAI's images API over a mixture. No Ray: any ASGI server can run it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from torch import Tensor

from ddm_ray import __version__
from ddm_ray.config import RunConfig, SamplingSettings
from ddm_ray.core.condition import Condition
from ddm_ray.core.names import parse_strategy_name
from ddm_ray.errors import DDMError, ExpertCountError, NotFiniteError, SamplingError, ServeError
from ddm_ray.serve.answers import (
    USAGE,
    answer,
    degraded,
    error_body,
    event,
    expert_name,
    internal_error,
    retry_after,
    stretches,
    to_png,
)
from ddm_ray.serve.engine import DeadlineError
from ddm_ray.serve.generation import Generation, GenerationRequest, RequestError, resolve
from ddm_ray.serve.meters import Meters
from ddm_ray.serve.scheduler import OverloadedError
from ddm_ray.serve.segments import OnStop, Sampled
from ddm_ray.serve.versions import LiveSampler

_SOON = {"Retry-After": retry_after(5)}
SMALL_PIXELS = 128 * 128
CODEC_S = 60.0
Result = TypeVar("Result")


class ErrorAnswer(BaseModel):
    """OpenAI's error object."""

    error: dict[str, str | None]


REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "A field that can't be met, or no JSON"},
    401: {"model": ErrorAnswer, "description": "No token of this server's"},
    404: {"model": ErrorAnswer, "description": "Another model"},
    408: {"model": ErrorAnswer, "description": "The body came too slowly, or the request's time is over"},
    413: {"model": ErrorAnswer, "description": "The body is too large"},
    429: {"model": ErrorAnswer, "description": "More is asked for than can be made in time; see Retry-After"},
    500: {"model": ErrorAnswer, "description": "A fault of the server"},
    503: {"model": ErrorAnswer, "description": "No expert is there; see Retry-After"},
}
IMAGES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The images; a bare image for response_format png; events for stream",
        "content": {"application/json": {}, "image/png": {}, "text/event-stream": {}},
    }
}


@dataclass(frozen=True)
class Service:
    """A run as the application serves it; `defaults` of sampling where a request says nothing.

    `encode` makes a condition, one row, of a text, and `decode` images of latents; None where the run has none.
    `lacking` names the deployments that have no replica.
    """

    sampler: LiveSampler
    config: RunConfig
    defaults: SamplingSettings
    meters: Meters
    lacking: Callable[[], Awaitable[list[str]]]
    encode: Callable[[str], Awaitable[Condition]] | None = None
    decode: Callable[[Tensor], Awaitable[Tensor]] | None = None

    def resolve(self, request: GenerationRequest) -> Generation:
        """The request with default settings filled in. Raises RequestError."""
        defaults = self.defaults
        if self.sampler.version.router is None:
            defaults = defaults.changed(strategy="once")  # which needs none
        return resolve(request, self.config, defaults, self.sampler.info)

    async def sample(self, generation: Generation, on_stop: OnStop | None = None) -> Sampled:
        """Make a request's images, in pixels; `on_stop` is called with them on their way."""
        began, request, decode, seconds = time.monotonic(), generation.sample, self.decode, generation.seconds
        if generation.prompt is not None:
            assert self.encode is not None
            text = await _in_time(self.encode(generation.prompt), seconds)
            seconds = None if seconds is None else seconds - (time.monotonic() - began)
            request = replace(request, condition=text[torch.zeros(len(request.seeds), dtype=torch.int64)])

        async def decoded(images_BCHW: Tensor) -> None:
            assert on_stop is not None
            await on_stop(images_BCHW if decode is None else await decode(images_BCHW))

        sampled = await self.sampler.sample(request, seconds, generation.stops, None if on_stop is None else decoded)
        if decode is not None:
            left = None if generation.seconds is None else generation.seconds - (time.monotonic() - began)
            pixels_BCHW = await _in_time(decode(sampled.result.images_BCHW), left)
            sampled = replace(sampled, result=replace(sampled.result, images_BCHW=pixels_BCHW))
        # By its kind: names carry numbers of the clients' own.
        strategy = parse_strategy_name(request.settings.strategy or "once")[0]
        self.meters.images.labels(strategy).inc(len(request.seeds))
        self.meters.seconds.labels(strategy).observe(time.monotonic() - began)
        for expert, steps in enumerate(torch.bincount(sampled.result.experts_SB.flatten()).tolist()):
            if steps:
                self.meters.steps.labels(expert_name(expert)).inc(steps)
        for expert in sampled.away:
            self.meters.degraded.labels(expert_name(expert)).inc()
        return sampled


async def _in_time(work: Awaitable[Result], seconds: float | None) -> Result:
    """The result of encoding or decoding. DeadlineError after these seconds, or CODEC_S."""
    try:
        async with asyncio.timeout(CODEC_S if seconds is None else max(0.0, seconds)):
            return await work
    except TimeoutError:
        raise DeadlineError("out of time, waiting for the text encoder or the autoencoder") from None


def http_app(service: Service) -> FastAPI:
    """The application of a service."""
    config, info = service.config, service.sampler.info
    # FastAPI's own pages of documentation load scripts from elsewhere.
    http = FastAPI(title="ddm-ray", version=__version__, docs_url=None, redoc_url=None)
    entry = {"id": config.name, "object": "model", "created": 0, "owned_by": "ddm-ray"}
    http.exception_handler(RequestValidationError)(_malformed)
    http.exception_handler(HTTPException)(_no_such_route)
    http.exception_handler(DDMError)(_failed)
    http.exception_handler(Exception)(_crashed)

    @http.post("/v1/images/generations", responses=IMAGES | REFUSALS, response_class=JSONResponse)
    async def generate(request: GenerationRequest) -> Response:
        """Images of one class, by OpenAI's API; response_format png answers the bare image."""
        generation = service.resolve(request)
        if generation.stream:
            return await _stream(service, generation)
        sampled, upscaling = await service.sample(generation), generation.upscaling
        if generation.png:
            return await _drawn(generation, _bare, generation, sampled)
        created = int(time.time())
        content = await _drawn(generation, answer, generation.sample, sampled, upscaling, config.name, created)
        return JSONResponse(content)

    @http.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model served here: the run."""
        return {"object": "list", "data": [entry]}

    @http.get("/v1/models/{name:path}", responses={404: REFUSALS[404]})
    async def model(name: str) -> dict[str, Any]:
        """The model of that name."""
        if name != config.name:
            raise RequestError(f"this model isn't served here: use {config.name!r}", "model", "model_not_found", 404)
        return entry

    @http.get("/healthz")
    async def healthz() -> dict[str, Any]:
        """A sign of life of the ingress, and what it serves; wakes no expert that scaled to zero."""
        experts = [expert_name(expert) for expert in range(info.num_experts)]
        served = {"model": config.name, "experts": experts, "weights": service.sampler.version.steps()}
        return {"status": "ok", **served, "classes": list(config.data.class_names)}

    @http.get("/readyz", responses={503: {"description": "Deployments without a replica are named"}})
    async def readyz() -> Response:
        """The deployments that have no replica: 200 without any, else 503."""
        away = await service.lacking()
        return JSONResponse({"status": "degraded" if away else "ok", "away": away}, 503 if away else 200)

    @http.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counters and gauges for Prometheus."""
        return Response(service.meters.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    http.openapi = partial(_description, http)  # type: ignore[method-assign]
    return http


async def _drawn(generation: Generation, draw: Callable[..., Result], *args: Any, **others: Any) -> Result:
    """Call `draw` with a request's images, in another thread if these are large: PNGs take their time."""
    if generation.num_pixels < SMALL_PIXELS:
        return draw(*args, **others)
    return await asyncio.to_thread(draw, *args, **others)


def _description(http: FastAPI) -> dict[str, Any]:
    """The OpenAPI description, without the status that FastAPI takes for granted and nothing here sends."""
    description = FastAPI.openapi(http)
    for path in description["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    return description


def _bare(generation: Generation, sampled: Sampled) -> Response:
    result = sampled.result
    headers = {
        "X-Seed": str(generation.sample.seeds[0]),
        "X-Experts": json.dumps(stretches(result.experts_SB[:, 0].tolist())),
    }
    if sampled.away:
        headers["X-Degraded"] = ",".join(degraded(sampled)["degraded"])
    return Response(to_png(result.images_BCHW[0], generation.upscaling), media_type="image/png", headers=headers)


async def _stream(service: Service, generation: Generation) -> Response:
    """The image on its way and at its end, as events. What is refused at once is refused before any."""
    events, index = asyncio.Queue[bytes | None](), 0

    async def on_stop(images_BCHW: Tensor) -> None:
        nonlocal index
        number, index = index, index + 1
        part = await _drawn(
            generation,
            event,
            "partial_image",
            images_BCHW[0],
            generation.upscaling,
            int(time.time()),
            partial_image_index=number,
        )
        events.put_nowait(part)

    sampling = asyncio.ensure_future(service.sample(generation, on_stop))
    sampling.add_done_callback(lambda _: events.put_nowait(None))
    try:
        first = await events.get()
        if first is None:
            await sampling
    except BaseException:
        sampling.cancel()
        raise

    async def body() -> AsyncIterator[bytes]:
        part = first
        try:
            while part is not None:
                yield part
                part = await events.get()
            sampled = await sampling
            yield await _drawn(
                generation,
                event,
                "completed",
                sampled.result.images_BCHW[0],
                generation.upscaling,
                int(time.time()),
                seed=generation.sample.seeds[0],
                experts=stretches(sampled.result.experts_SB[:, 0].tolist()),
                usage=USAGE,
                **degraded(sampled),
            )
        except Exception as error:
            answered = _error_of(error)[1] if isinstance(error, DDMError) else internal_error(error)
            yield f"event: error\ndata: {json.dumps(answered)}\n\n".encode()
        finally:
            sampling.cancel()

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _error_of(error: DDMError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of an answer that says this error."""
    if isinstance(error, RequestError):
        return error.status, error_body(str(error), error.param, error.code), {}
    if isinstance(error, SamplingError) and not isinstance(error, NotFiniteError | ExpertCountError):
        return 400, error_body(str(error), None, "invalid_value"), {}
    if isinstance(error, OverloadedError):
        return 429, error_body(str(error), None, "overloaded"), {"Retry-After": retry_after(error.retry_after_s)}
    if isinstance(error, DeadlineError):
        return 408, error_body(str(error), None, "deadline_exceeded"), _SOON
    if isinstance(error, ServeError):
        return 503, error_body(str(error), None, "unavailable", server=True), _SOON
    return 500, error_body(str(error), None, "sampling_failed", server=True), {}


async def _failed(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, DDMError)
    status, body, headers = _error_of(error)
    return JSONResponse(body, status, headers)


async def _crashed(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse(internal_error(error), 500)


async def _malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if not request.headers.get("content-type", "").startswith("application/json"):
        message = "send JSON, with the header Content-Type: application/json"
        return JSONResponse(error_body(message, None, "not_json"), 400)
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        message = f"the body isn't whole JSON: {errors[0]['ctx']['error']}"
        return JSONResponse(error_body(message, None, "malformed_json"), 400)
    fields = [".".join(str(part) for part in each["loc"][1:])[:60] for each in errors]
    messages = [each["msg"].removeprefix("Value error, ") for each in errors]
    lines = [f"{field}: {message}" for field, message in zip(fields, messages, strict=True)]
    message = "; ".join(line.removeprefix(": ") for line in lines[:3])
    return JSONResponse(error_body(message, fields[0] or None, "invalid_value"), 400)


async def _no_such_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:100]}: {error.detail}; the routes are listed at /openapi.json"
    return JSONResponse(error_body(message, None, None), error.status_code, error.headers)
