"""The HTTP ingress: OpenAI's images API over the mixture."""

import json
import time
from collections.abc import Sequence
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from ddm_ray import __version__
from ddm_ray.errors import DDMError
from ddm_ray.sampling.run_models import mixture_info, sampling_settings
from ddm_ray.serve.generation import (
    GenerationRequest,
    RequestError,
    answer,
    error_body,
    resolve,
    segments,
    to_png,
)
from ddm_ray.serve.remote_sampler import RemoteSampler
from ddm_ray.storage.run import Run

http = FastAPI(title="ddm-ray", version=__version__)


@http.exception_handler(RequestError)
async def _refused(_: Request, error: RequestError) -> JSONResponse:
    return JSONResponse(error_body(str(error), error.param, error.code), error.status)


@http.exception_handler(RequestValidationError)
async def _malformed(request: Request, error: RequestValidationError) -> JSONResponse:
    if not request.headers.get("content-type", "").startswith("application/json"):
        message = "send JSON, with the header Content-Type: application/json"
        return JSONResponse(error_body(message, None, "not_json"), 400)
    findings = error.errors()
    if findings[0]["type"] == "json_invalid":
        message = f"the body isn't whole JSON: {findings[0]['ctx']['error']}"
        return JSONResponse(error_body(message, None, "malformed_json"), 400)
    fields = [".".join(str(part) for part in finding["loc"][1:]) for finding in findings]
    messages = [finding["msg"].removeprefix("Value error, ") for finding in findings]
    lines = [f"{field}: {message}" for field, message in zip(fields, messages, strict=True)]
    message = "; ".join(line.removeprefix(": ") for line in lines[:3])
    return JSONResponse(error_body(message, fields[0] or None, "invalid_value"), 400)


@http.exception_handler(HTTPException)
async def _no_such_route(request: Request, error: HTTPException) -> JSONResponse:
    message = f"{request.method} {request.url.path}: {error.detail}; the routes are listed at /docs"
    return JSONResponse(error_body(message, None, None), error.status_code, error.headers)


@serve.ingress(http)
class API:
    """Answers requests for images by calls of expert and router replicas."""

    def __init__(self, run_url: str, experts: Sequence[DeploymentHandle[Any]], router: DeploymentHandle[Any]):
        """`experts` by cluster. Raises RunError, MissingArtifact, DriftError."""
        torch.set_num_threads(1)
        run = Run.open(run_url)
        self._config, self._defaults = run.config, sampling_settings(run)
        self._sampler = RemoteSampler(mixture_info(run), experts, router)
        self._expert_names = [f"expert-{cluster:03d}" for cluster in range(len(experts))]

    @http.post("/v1/images/generations")
    async def generate(self, request: GenerationRequest) -> Response:
        """Images of one class, by OpenAI's API; response_format png answers the bare image."""
        generation = resolve(request, self._config, self._defaults)
        try:
            result = await self._sampler.sample(generation.sample)
        except DDMError as error:
            return JSONResponse(error_body(str(error), None, "sampling_failed", server=True), 500)
        except (RayError, RayServeException) as error:
            message = f"an expert or the router can't be reached, try again soon: {type(error).__name__}"
            return JSONResponse(error_body(message, None, "unavailable", server=True), 503)
        if generation.png:
            experts = json.dumps(segments(result.experts_SB[:, 0].tolist()))
            headers = {"X-Seed": str(generation.sample.seeds[0]), "X-Experts": experts}
            png = to_png(result.images_BCHW[0], generation.upscaling)
            return Response(png, media_type="image/png", headers=headers)
        return JSONResponse(answer(generation, result, self._config.name, int(time.time())))

    @http.get("/v1/models")
    async def models(self) -> dict[str, Any]:
        """The one model served here: the run."""
        entry = {"id": self._config.name, "object": "model", "created": 0, "owned_by": "ddm-ray"}
        return {"object": "list", "data": [entry]}

    @http.get("/healthz")
    async def healthz(self) -> dict[str, Any]:
        """Health of the ingress, and the names of the experts; wakes none that scaled to zero."""
        classes = list(self._config.data.class_names)
        return {"status": "ok", "model": self._config.name, "experts": self._expert_names, "classes": classes}
