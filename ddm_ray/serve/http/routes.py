"""The HTTP application: OpenAI's images API for a mixture. Without Ray: any ASGI server can run it."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ddm_ray import __version__
from ddm_ray.errors import DDMError, ExpertCountError, NotFiniteError, SamplingError, ServeError
from ddm_ray.sampling.request import SampleResult
from ddm_ray.serve.engine.runner import DeadlineError
from ddm_ray.serve.engine.scheduler import OverloadedError
from ddm_ray.serve.engine.segments import Sampled
from ddm_ray.serve.http.generation import Generation, GenerationRequest, RequestError
from ddm_ray.serve.http.openai_errors import OF_ANY_ROUTE, REFUSALS, Responses, error_body, internal_error, retry_after
from ddm_ray.serve.http.page_files import add_page
from ddm_ray.serve.http.responses import (
    USAGE,
    degraded,
    expert_stretches,
    image_file,
    images_response,
    model_entry,
    routing,
    routing_fields,
    stream_event,
)
from ddm_ray.serve.http.service import Service

LOG = logging.getLogger("ray.serve")

_SOON = {"Retry-After": retry_after(5)}
SMALL_PIXELS = 128 * 128
IMAGES: Responses = {
    200: {
        "description": "The images; a bare image for response_format png; events for stream",
        "content": {"application/json": {}, "image/png": {}, "text/event-stream": {}},
    }
}
AWAY: Responses = {503: {"description": "Deployments without a replica are named", "content": {"application/json": {}}}}
Result = TypeVar("Result")
_UNREADABLE: dict[type, str] = {UnicodeDecodeError: "it isn't UTF-8", RecursionError: "it is nested too deeply"}


def http_app(service: Service) -> FastAPI:
    """The application of a service."""
    config = service.config
    # FastAPI's pages of documentation load scripts from other servers, and its redirections aren't OpenAI's errors.
    http = FastAPI(title="ddm-ray", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)

    def entry(name: str) -> dict[str, Any]:
        model = service.model(name)
        clusters = () if model.alone else model.sampler.info.clusters
        return model_entry(name, config, service.credit, clusters, model.sampler.defaults)

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
        sampled = await service.sample(generation)
        if generation.bare:
            return await _drawn(generation, _bare, generation, sampled)
        parts = generation, sampled, request.model or config.name, int(time.time())
        return JSONResponse(await _drawn(generation, images_response, *parts))

    @http.get("/v1/models", responses=OF_ANY_ROUTE)
    async def models() -> dict[str, Any]:
        """The models served here, each with its classes, its experts and its defaults of sampling."""
        return {"object": "list", "data": [entry(name) for name in service.models]}

    @http.get("/v1/models/{name:path}", responses=OF_ANY_ROUTE | {404: REFUSALS[404]})
    async def model(name: str) -> dict[str, Any]:
        """The model of that name."""
        return entry(name)

    @http.get("/healthz")
    async def healthz() -> dict[str, Any]:
        """A sign of life of the ingress, and what it serves; wakes no expert that scaled to zero."""
        steps: dict[str, Any] = {}
        for model in service.models.values():
            steps |= model.sampler.version.steps()
        return {"status": "ok", "model": config.name, "experts": entry(config.name)["experts"], "weights": steps}

    @http.get("/readyz", responses=AWAY)
    async def readyz() -> Response:
        """The deployments that have no replica: 200 without any, else 503."""
        away = await service.lacking()
        return JSONResponse({"status": "degraded" if away else "ok", "away": away}, 503 if away else 200)

    @http.get("/metrics", response_class=Response, responses=OF_ANY_ROUTE)
    async def metrics() -> Response:
        """Counters and gauges for Prometheus."""
        return Response(service.meters.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    add_page(http)
    return http


async def _drawn(generation: Generation, draw: Callable[..., Result], *args: Any, **others: Any) -> Result:
    """Call `draw` with a request's images, in another thread if these are large: PNGs take their time."""
    if generation.num_pixels < SMALL_PIXELS:
        return draw(*args, **others)
    return await asyncio.to_thread(draw, *args, **others)


def _bare(generation: Generation, sampled: Sampled) -> Response:
    result = sampled.result
    headers = {
        "X-Seed": str(generation.sample.seeds[0]),
        "X-Experts": json.dumps(expert_stretches(generation, sampled)[0]),
    }
    if sampled.away:
        headers["X-Degraded"] = ",".join(degraded(sampled)["degraded"])
    if sampled.cut:
        headers["X-Truncated"] = "{} of {} tokens".format(*sampled.cut)
    return Response(image_file(result.images_BCHW[0], generation.upscaling), media_type="image/png", headers=headers)


async def _stream(service: Service, generation: Generation) -> Response:
    """The unfinished and the finished image, as events. A refusal at once comes before any event."""
    events, index = asyncio.Queue[bytes | None](), 0

    def routed(result: SampleResult) -> dict[str, Any]:
        return routing_fields(generation, result, routing(result, 0))

    async def on_stop(foreseen: SampleResult) -> None:
        nonlocal index
        number, index = index, index + 1
        part = await _drawn(
            generation,
            stream_event,
            "partial_image",
            foreseen.images_BCHW[0],
            generation,
            int(time.time()),
            partial_image_index=number,
            **routed(foreseen),
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
                stream_event,
                "completed",
                sampled.result.images_BCHW[0],
                generation,
                int(time.time()),
                seed=generation.sample.seeds[0],
                experts=expert_stretches(generation, sampled)[0],
                usage=USAGE,
                **routed(sampled.result),
                **degraded(sampled),
            )
        except Exception as error:
            answered = _error_of(error)[1] if isinstance(error, DDMError) else internal_error(error)
            yield f"event: error\ndata: {json.dumps(answered)}\n\n".encode()
        finally:
            sampling.cancel()

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _error_of(error: DDMError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of the answer to this error; it doesn't have paths of storage and files.

    An error from another process may be an exception of Ray's, too: then its own text is a traceback.
    """
    cause = getattr(error, "cause", None)
    error = cause if isinstance(cause, DDMError) else error
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
    if isinstance(error, SamplingError):
        return 500, error_body(str(error), None, "sampling_failed", server=True), {}
    LOG.error("%s: %s", type(error).__name__, error)
    return 500, internal_error(error), {}


async def _failed(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, DDMError)
    status, body, headers = _error_of(error)
    return JSONResponse(body, status, headers)


async def _crashed(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse(internal_error(error), 500)


async def _malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    if isinstance(error.body, bytes | None):  # there is none, or its header doesn't call it JSON
        message = "send a JSON object, with the header Content-Type: application/json"
        return JSONResponse(error_body(message, None, "not_json"), 400)
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        return _unread(request, errors[0]["ctx"]["error"])
    fields = [".".join(str(part) for part in each["loc"][1:])[:60] for each in errors]
    messages = [each["msg"].removeprefix("Value error, ") for each in errors]
    lines = [f"{field}: {message}" for field, message in zip(fields, messages, strict=True)]
    message = "; ".join(line.removeprefix(": ") for line in lines[:3])
    return JSONResponse(error_body(message, fields[0] or None, "invalid_value"), 400)


def _unread(request: Request, reason: str) -> JSONResponse:
    """The refusal of a body that can't be read as JSON. One that is encoded has that reason alone."""
    if encoding := request.headers.get("content-encoding"):
        reason = f"Content-Encoding {encoding[:20]} isn't decoded here, leave it out"
    return JSONResponse(error_body(f"the body isn't whole JSON: {reason}", None, "malformed_json"), 400)


async def _no_such_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.__cause__ is not None:  # FastAPI's words for what reading a body raises, but for errors of JSON's grammar
        return _unread(request, _UNREADABLE.get(type(error.__cause__), "a number has too many digits"))
    message = f"{request.method} {request.url.path[:60]}: {error.detail}; the routes are listed at /openapi.json"
    return JSONResponse(error_body(message, None, None), error.status_code, error.headers)
