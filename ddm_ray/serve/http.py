"""The HTTP application: OpenAI's images API over a mixture. No Ray: any ASGI server can run it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from torch import Tensor

from ddm_ray import __version__
from ddm_ray.config import RunConfig, SamplingSettings
from ddm_ray.errors import DDMError, ServeError
from ddm_ray.serve.engine import DeadlineError
from ddm_ray.serve.generation import (
    USAGE,
    Generation,
    GenerationRequest,
    RequestError,
    answer,
    error_body,
    event,
    expert_name,
    resolve,
    retry_after,
    stretches,
    to_png,
)
from ddm_ray.serve.meters import Meters
from ddm_ray.serve.scheduler import OverloadedError
from ddm_ray.serve.segments import Sampled, SegmentSampler

_SOON = {"Retry-After": retry_after(5)}


class ErrorAnswer(BaseModel):
    """OpenAI's error object."""

    error: dict[str, str | None]


REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "A field that can't be met, or no JSON"},
    401: {"model": ErrorAnswer, "description": "No token of this server's"},
    404: {"model": ErrorAnswer, "description": "Another model"},
    408: {"model": ErrorAnswer, "description": "The body came too slowly"},
    413: {"model": ErrorAnswer, "description": "The body is too large"},
    429: {"model": ErrorAnswer, "description": "More is asked for than can be made in time; see Retry-After"},
    500: {"model": ErrorAnswer, "description": "A fault of the server"},
    503: {"model": ErrorAnswer, "description": "No expert is there; see Retry-After"},
    504: {"model": ErrorAnswer, "description": "The request's time was over before its images were done"},
}
IMAGES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The images; a bare image for response_format png; events for stream",
        "content": {"application/json": {}, "image/png": {}, "text/event-stream": {}},
    }
}

Readiness = Callable[[], Awaitable[list[str]]]
"""Names of the deployments that have no replica."""


def http_app(
    sampler: SegmentSampler,
    config: RunConfig,
    defaults: SamplingSettings,
    meters: Meters,
    lacking: Readiness,
) -> FastAPI:
    """The application that serves a run of this configuration; `defaults` of sampling where a request says nothing."""
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
        began = time.monotonic()
        generation = resolve(request, config, defaults, sampler.info)
        if generation.stream:
            return await _stream(sampler, generation, meters)
        sampled = await sampler.sample(generation.sample, generation.seconds)
        _count(meters, generation, sampled, time.monotonic() - began)
        if generation.png:
            return await asyncio.to_thread(_bare, generation, sampled)
        return JSONResponse(await asyncio.to_thread(answer, generation, sampled, config.name, int(time.time())))

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
        experts = [expert_name(expert) for expert in range(sampler.info.num_experts)]
        return {"status": "ok", "model": config.name, "experts": experts, "classes": list(config.data.class_names)}

    @http.get("/readyz", responses={503: {"description": "Deployments without a replica are named"}})
    async def readyz() -> Response:
        """The deployments that have no replica: 200 without any, else 503."""
        away = await lacking()
        return JSONResponse({"status": "degraded" if away else "ok", "away": away}, 503 if away else 200)

    @http.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counters and gauges for Prometheus."""
        return Response(meters.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    http.openapi = partial(_description, http)  # type: ignore[method-assign]
    return http


def _description(http: FastAPI) -> dict[str, Any]:
    """The OpenAPI description, without the status that FastAPI takes for granted and nothing here sends."""
    description = FastAPI.openapi(http)
    for path in description["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    return description


def _count(meters: Meters, generation: Generation, sampled: Sampled, seconds: float) -> None:
    strategy = generation.sample.settings.strategy or ""
    meters.images.labels(strategy).inc(len(generation.sample.seeds))
    meters.seconds.labels(strategy).observe(seconds)
    for expert in sampled.away:
        meters.degraded.labels(expert_name(expert)).inc()


def _bare(generation: Generation, sampled: Sampled) -> Response:
    result = sampled.result
    headers = {
        "X-Seed": str(generation.sample.seeds[0]),
        "X-Experts": json.dumps(stretches(result.experts_SB[:, 0].tolist())),
    }
    if sampled.away:
        headers["X-Degraded"] = ",".join(expert_name(expert) for expert in sorted(sampled.away))
    return Response(to_png(result.images_BCHW[0], generation.upscaling), media_type="image/png", headers=headers)


async def _stream(sampler: SegmentSampler, generation: Generation, meters: Meters) -> Response:
    """The image on its way and at its end, as events. What is refused at once is refused before any."""
    events, began = asyncio.Queue[bytes | None](), time.monotonic()
    index = 0

    async def on_stop(images_BCHW: Tensor) -> None:
        nonlocal index
        number, index = index, index + 1
        part = await asyncio.to_thread(
            event,
            "partial_image",
            images_BCHW[0],
            generation.upscaling,
            int(time.time()),
            partial_image_index=number,
        )
        events.put_nowait(part)

    sampling = asyncio.ensure_future(sampler.sample(generation.sample, generation.seconds, generation.stops, on_stop))
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
            _count(meters, generation, sampled, time.monotonic() - began)
            degraded = {"degraded": [expert_name(expert) for expert in sorted(sampled.away)]} if sampled.away else {}
            yield await asyncio.to_thread(
                event,
                "completed",
                sampled.result.images_BCHW[0],
                generation.upscaling,
                int(time.time()),
                seed=generation.sample.seeds[0],
                experts=stretches(sampled.result.experts_SB[:, 0].tolist()),
                usage=USAGE,
                **degraded,
            )
        except DDMError as error:
            yield f"event: error\ndata: {json.dumps(_error_of(error)[1])}\n\n".encode()
        finally:
            sampling.cancel()

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _error_of(error: DDMError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of an answer that says this error."""
    if isinstance(error, RequestError):
        return error.status, error_body(str(error), error.param, error.code), {}
    if isinstance(error, OverloadedError):
        return 429, error_body(str(error), None, "overloaded"), {"Retry-After": retry_after(error.retry_after_s)}
    if isinstance(error, DeadlineError):
        return 504, error_body(str(error), None, "deadline_exceeded", server=True), _SOON
    if isinstance(error, ServeError):
        return 503, error_body(str(error), None, "unavailable", server=True), _SOON
    return 500, error_body(str(error), None, "sampling_failed", server=True), {}


async def _failed(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, DDMError)
    status, body, headers = _error_of(error)
    return JSONResponse(body, status, headers)


async def _crashed(_: Request, error: Exception) -> JSONResponse:
    message = f"an error of the server, not of the request: {type(error).__name__}"
    return JSONResponse(error_body(message, None, "internal_error", server=True), 500)


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
