"""What a request for images means and what its answer looks like. No Ray, no HTTP.

Shapes: B images, CHW image, S steps.
"""

import base64
import io
import re
import secrets
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ddm_ray.config import DataConfig, RunConfig
from ddm_ray.core.routing import Oracle, parse_strategy
from ddm_ray.core.solvers import SOLVERS
from ddm_ray.errors import SamplingError, ServeError
from ddm_ray.sampling.images import to_pil, to_unit
from ddm_ray.sampling.request import SampleRequest

MOST_IMAGES = 10
MOST_STEPS = 1000
MOST_LISTED = 50
MOST_PIXELS = 2048  # along one side, after upscaling
LARGEST_SEED = 2**53 - 1  # beyond it, JSON numbers lose digits in many clients


class RequestError(ServeError):
    """A request that can't be met. `param` is its field, `code` a word for programs, as OpenAI has them."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_value", status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class GenerationRequest(BaseModel):
    """Body of POST /v1/images/generations: OpenAI's fields, and ours from `class_label` on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt: str | None = Field(None, description="a class name of the run; empty: no class")
    model: str | None = Field(None, description="the run's name, or nothing")
    n: int = Field(1, ge=1, le=MOST_IMAGES, description="number of images")
    size: str | None = Field(None, description="WIDTHxHEIGHT, the model's own or a multiple of it")
    response_format: Literal["b64_json", "png"] = Field("b64_json", description="png: the bare image, n = 1")
    user: str | None = Field(None, description="accepted for OpenAI's clients, unused")
    class_label: int | None = Field(None, ge=0, description="index of the class, instead of a prompt")
    strategy: str | None = Field(None, description="once, full, top-2, nucleus-0.9 ...; nothing: the run's default")
    steps: int | None = Field(None, ge=1, le=MOST_STEPS)
    guidance_scale: float | None = Field(None, ge=-100, le=100, allow_inf_nan=False)
    seed: int | None = Field(None, ge=0, le=LARGEST_SEED - MOST_IMAGES, description="of the first image")
    solver: str | None = Field(None, description="euler, heun, midpoint or ab2")


@dataclass(frozen=True)
class Generation:
    """A request that can be met: what to sample, the factor of upscaling, whether to answer a bare PNG."""

    sample: SampleRequest
    scale: int
    png: bool


def resolve(request: GenerationRequest, config: RunConfig, default_strategy: str) -> Generation:
    """The request with the run's defaults filled in. Raises RequestError: the field, and what it may be."""
    if request.model not in (None, config.name):
        raise RequestError(
            f"model {request.model!r} isn't served here: use {config.name!r}", "model", "model_not_found", 404
        )
    if request.response_format == "png" and request.n > 1:
        raise RequestError(f"response_format png carries one image, n is {request.n}: use b64_json", "n")
    label = _label(request, config.data)
    defaults = config.sample
    strategy = default_strategy if request.strategy is None else request.strategy
    solver = defaults.solver if request.solver is None else request.solver
    try:
        chosen = parse_strategy(strategy, config.partition.num_clusters)
    except SamplingError as error:
        raise RequestError(str(error), "strategy") from None
    if isinstance(chosen, Oracle):
        raise RequestError("strategy oracle needs images whose cluster is known: use once", "strategy")
    if solver not in SOLVERS:
        raise RequestError(f"unknown solver {solver!r}: use one of {', '.join(SOLVERS)}", "solver")
    seed = secrets.randbelow(2**32) if request.seed is None else request.seed
    guidance = defaults.guidance_scale if request.guidance_scale is None else request.guidance_scale
    sample = SampleRequest(
        seeds=tuple(range(seed, seed + request.n)),
        condition=torch.full((request.n,), label),
        steps=request.steps or defaults.steps,
        guidance_scale=guidance,
        strategy=strategy,
        solver=solver,
        times=defaults.times,
        guidance_interval=defaults.guidance_interval,
        guidance=defaults.guidance,
    )
    return Generation(sample, _scale(request.size, config.data.image_size), request.response_format == "png")


def _label(request: GenerationRequest, data: DataConfig) -> int:
    names = list(data.class_names)
    listed = ", ".join(names[:MOST_LISTED]) + (", ... (all at /healthz)" if len(names) > MOST_LISTED else "")
    listing = f"prompt: one of {listed}; class_label: 0 to {len(names) - 1}"
    if (request.prompt is None) == (request.class_label is None):
        given = "neither was given" if request.prompt is None else "both were given"
        raise RequestError(f"say what to paint by prompt or by class_label ({given}); {listing}", "prompt")
    if request.class_label is not None:
        if request.class_label >= len(names):
            raise RequestError(f"unknown class_label {request.class_label}; {listing}", "class_label")
        return request.class_label
    assert request.prompt is not None
    prompt = request.prompt.strip()
    if not prompt:
        return len(names)
    if prompt not in names:
        raise RequestError(f"unknown class {prompt[:60]!r}; {listing}", "prompt", "unknown_class")
    return names.index(prompt)


def _scale(size: str | None, image_size: int) -> int:
    if size is None:
        return 1
    sides = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", size)
    width, height = (int(side) for side in sides.groups()) if sides else (0, -1)
    largest = max(1, MOST_PIXELS // image_size) * image_size
    if width != height or not 0 < width <= largest or width % image_size:
        raise RequestError(
            f"size {size[:20]!r} can't be made: use {image_size}x{image_size} or a multiple of it"
            f" up to {largest}x{largest}",
            "size",
        )
    return width // image_size


def to_png(image_CHW: Tensor, scale: int) -> bytes:
    """PNG (grey or RGB) of an image in [-1, 1], clipped; each pixel becomes scale x scale ones."""
    (image,) = to_pil(to_unit(image_CHW[None]))
    image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    sink = io.BytesIO()
    image.save(sink, "PNG")
    return sink.getvalue()


def segments(experts_S: list[int]) -> list[dict[str, int]]:
    """An image's way as stretches of steps under one (heaviest) expert: [{"expert": 2, "steps": 25}]."""
    return [{"expert": expert, "steps": len(list(group))} for expert, group in groupby(experts_S)]


def answer(generation: Generation, images_BCHW: Tensor, experts_SB: Tensor, model: str, created: int) -> dict[str, Any]:
    """OpenAI's images response, and beside it model, strategy, and per image the experts that painted it."""
    encoded = [base64.b64encode(to_png(image, generation.scale)).decode() for image in images_BCHW]
    return {
        "created": created,
        "data": [
            {"b64_json": b64_json, "seed": seed}
            for b64_json, seed in zip(encoded, generation.sample.seeds, strict=True)
        ],
        "model": model,
        "strategy": generation.sample.strategy,
        "experts": [segments(experts_S) for experts_S in experts_SB.T.tolist()],
    }


def error_body(message: str, param: str | None, code: str | None, server: bool = False) -> dict[str, Any]:
    """OpenAI's error object; `server`: the fault isn't the request's."""
    kind = "server_error" if server else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
