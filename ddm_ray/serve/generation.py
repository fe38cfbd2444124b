"""Schema and meaning of a request for images, and the form of its answer. No Ray, no HTTP.

Shapes: B images, CHW image, S steps.
"""

import base64
import re
import secrets
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

import torch
from PIL import Image
from pydantic import Field, create_model
from pydantic.fields import FieldInfo
from torch import Tensor

from ddm_ray.config import DataConfig, RunConfig, SamplingSettings, StrictModel
from ddm_ray.core.routing import Oracle
from ddm_ray.errors import SamplingError, ServeError
from ddm_ray.pictures import png
from ddm_ray.pictures.images import to_pil, to_unit
from ddm_ray.sampling.request import SampleRequest, SampleResult

MAX_IMAGES = 10
MAX_LISTED = 50
MAX_PIXELS = 2048  # along one side, after upscaling
MAX_SEED = 2**53 - 1  # beyond it, JSON numbers lose digits in many clients
LIMITS = {
    "steps": Field(le=1000),
    "guidance_scale": Field(ge=-100, le=100),
    "router_temperature": Field(ge=1e-3, le=1e3),
}
"""Bounds of a server beside the settings' own ranges: work, and numbers that overflow."""
SETTINGS = SamplingSettings.model_fields


class RequestError(ServeError):
    """A request that can't be met. `param`: its field; `code`: OpenAI's word for the kind of error."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_value", status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def _setting(name: str, field: FieldInfo) -> tuple[Any, Any]:
    """A field of SamplingSettings as one that a request may leave out: its type and range, no default."""
    kind: Any = Annotated[field.annotation, *field.metadata, LIMITS.get(name, Field())]
    return kind | None, Field(None, description=field.description)


_fields: dict[str, Any] = {name: _setting(name, field) for name, field in SETTINGS.items()}
_Settings: Any = create_model("_Settings", __base__=StrictModel, **_fields)


class GenerationRequest(_Settings):
    """Body of POST /v1/images/generations: OpenAI's fields, class_label, seed, and those of SamplingSettings."""

    prompt: str | None = Field(None, description="a class name of the run; empty: no class")
    model: str | None = Field(None, description="the run's name, or nothing")
    n: int = Field(1, ge=1, le=MAX_IMAGES, description="number of images")
    size: str | None = Field(None, description="WIDTHxHEIGHT, the model's own or a multiple of it")
    response_format: Literal["b64_json", "png"] = Field("b64_json", description="png: the bare image, n = 1")
    user: str | None = Field(None, description="accepted for OpenAI's clients, unused")
    class_label: int | None = Field(None, ge=0, description="index of the class, instead of a prompt")
    seed: int | None = Field(None, ge=0, le=MAX_SEED - MAX_IMAGES, description="seed of the first image")

    def settings(self, defaults: SamplingSettings) -> SamplingSettings:
        """The defaults, and what the request says in place of them."""
        return defaults.changed(**self.model_dump(include=set(SETTINGS), exclude_none=True))


@dataclass(frozen=True)
class Generation:
    """A request that can be met: what to sample, the factor of upscaling, whether to answer a bare PNG."""

    sample: SampleRequest
    upscaling: int
    png: bool


def resolve(request: GenerationRequest, config: RunConfig, defaults: SamplingSettings) -> Generation:
    """The request with the run's default settings filled in. Raises RequestError: the field, and what it may be."""
    if request.model not in (None, config.name):
        raise RequestError(
            f"model {request.model!r} isn't served here: use {config.name!r}", "model", "model_not_found", 404
        )
    if request.response_format == "png" and request.n > 1:
        raise RequestError(f"response_format png carries one image, n is {request.n}: use b64_json", "n")
    label = _label(request, config.data)
    seed = secrets.randbelow(2**32) if request.seed is None else request.seed
    seeds = tuple(range(seed, seed + request.n))
    sample = SampleRequest(seeds, torch.full((request.n,), label), request.settings(defaults))
    try:
        strategy = sample.strategy(config.partition.num_clusters)
    except SamplingError as error:
        raise RequestError(str(error), "strategy") from None
    if isinstance(strategy, Oracle):
        raise RequestError("strategy oracle needs images whose cluster is known: use once", "strategy")
    return Generation(sample, _upscaling(request.size, config.data.image_size), request.response_format == "png")


def _label(request: GenerationRequest, data: DataConfig) -> int:
    names = list(data.class_names)
    listed = ", ".join(names[:MAX_LISTED]) + (", ... (all at /healthz)" if len(names) > MAX_LISTED else "")
    listing = f"prompt: one of {listed}; class_label: 0 to {len(names) - 1}"
    if (request.prompt is None) == (request.class_label is None):
        given = "neither was given" if request.prompt is None else "both were given"
        raise RequestError(f"name the class by prompt or by class_label ({given}); {listing}", "prompt")
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


def _upscaling(size: str | None, image_size: int) -> int:
    if size is None:
        return 1
    sides = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", size)
    width, height = (int(side) for side in sides.groups()) if sides else (0, -1)
    largest = max(1, MAX_PIXELS // image_size) * image_size
    if width != height or not 0 < width <= largest or width % image_size:
        raise RequestError(
            f"size {size[:20]!r} can't be made: use {image_size}x{image_size} or a multiple of it"
            f" up to {largest}x{largest}",
            "size",
        )
    return width // image_size


def to_png(image_CHW: Tensor, upscaling: int) -> bytes:
    """PNG (grey or RGB) of an image in [-1, 1], clipped; each pixel becomes upscaling x upscaling ones."""
    (image,) = to_pil(to_unit(image_CHW[None]))
    image = image.resize((image.width * upscaling, image.height * upscaling), Image.Resampling.NEAREST)
    return png.to_png(image, compression=6)


def segments(experts_S: list[int]) -> list[dict[str, int]]:
    """Stretches of steps under one (heaviest) expert: [{"expert": 2, "steps": 25}]."""
    return [{"expert": expert, "steps": len(list(group))} for expert, group in groupby(experts_S)]


def answer(generation: Generation, result: SampleResult, model: str, created: int) -> dict[str, Any]:
    """OpenAI's images response, and beside it model, strategy, and per image the experts that sampled it."""
    encoded = [base64.b64encode(to_png(image, generation.upscaling)).decode() for image in result.images_BCHW]
    return {
        "created": created,
        "data": [
            {"b64_json": b64_json, "seed": seed}
            for b64_json, seed in zip(encoded, generation.sample.seeds, strict=True)
        ],
        "model": model,
        "strategy": generation.sample.settings.strategy,
        "experts": [segments(experts_S) for experts_S in result.experts_SB.T.tolist()],
    }


def error_body(message: str, param: str | None, code: str | None, server: bool = False) -> dict[str, Any]:
    """OpenAI's error object; `server`: the fault isn't the request's."""
    kind = "server_error" if server else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
