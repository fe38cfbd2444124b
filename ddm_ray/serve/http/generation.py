"""Schema and meaning of a request for images. No Ray, no HTTP."""

import re
import secrets
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, create_model, field_validator, model_validator
from pydantic.fields import FieldInfo

from ddm_ray.config import DataConfig, RunConfig, SamplingSettings, StrictModel
from ddm_ray.core.condition import Condition
from ddm_ray.core.routing import Oracle
from ddm_ray.errors import SamplingError, ServeError
from ddm_ray.plain_text import index_of
from ddm_ray.sampling.plan import SamplingPlan
from ddm_ray.sampling.request import MixtureInfo, SampleRequest
from ddm_ray.serve.engine.scheduler import MAX_TIMEOUT_S

MAX_IMAGES = 10
MAX_LISTED = 50
MAX_PIXELS = 2048  # along one side, after upscaling
MAX_PROMPT = 4000  # characters
MAX_SEED = 2**53 - 1  # beyond it, JSON numbers lose digits in many clients
MAX_PARTIAL_IMAGES = 50
MAX_PARTIAL_PIXELS = 2**24  # of a stream together: four images of the largest size
MAX_WORK = 20_000
"""Rows of networks that a request may need: images x velocities x experts x branches of guidance."""
MAX_STEPS = 1000
UNUSED = "accepted for OpenAI's clients, changes nothing"
FORMATS = ("png", "jpeg", "webp")
"""Values of output_format that can be made, of those that OpenAI's clients know."""
LIMITS = {
    "steps": Field(le=MAX_STEPS),
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

    prompt: str | None = Field(
        None,
        max_length=MAX_PROMPT,
        description="a text, or a class name of a run of classes; empty: none, or the class_label's; of a text too long"
        " for the run's encoder the rest is cut off, and `truncated` in the answer says so",
    )
    model: str | None = Field(None, description="a model of /v1/models; none: the mixture")
    n: int | None = Field(1, ge=1, le=MAX_IMAGES, strict=True, description="number of images")
    size: str | None = Field(None, description="WIDTHxHEIGHT, the model's own or a multiple of it; auto: its own")
    response_format: Literal["b64_json", "png"] | None = Field(
        "b64_json", description="png: the bare image, n = 1; a url would live on one replica, so there is none"
    )
    class_label: int | None = Field(None, ge=0, strict=True, description="index of the class, instead of a prompt")
    seed: int | None = Field(None, ge=0, le=MAX_SEED - MAX_IMAGES, strict=True, description="seed of the first image")
    num_inference_steps: int | None = Field(
        None, gt=0, le=MAX_STEPS, strict=True, description="steps, as diffusers calls them"
    )
    timeout: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, strict=True, description="seconds after which the images are of no use any more"
    )
    stream: bool | None = Field(
        None, strict=True, description="answer by server-sent events, as OpenAI streams images; n = 1"
    )
    partial_images: int | None = Field(
        None,
        ge=0,
        le=MAX_PARTIAL_IMAGES,
        strict=True,
        description=f"images on their way, of a stream, evenly spread; of {MAX_PARTIAL_PIXELS:,} pixels at most",
    )
    routing: bool | None = Field(
        None,
        strict=True,
        description="answer each image's routing, too: for each step so far the weights of all experts, which sum to 1",
    )
    output_format: Literal["png", "jpeg", "webp", "gif", "svg"] | None = Field(
        "png", description=f"format of the images: {', '.join(FORMATS)}; others of OpenAI's are refused"
    )
    output_compression: int | None = Field(
        100, ge=0, le=100, strict=True, description="quality of jpeg and webp; png loses nothing at any value"
    )
    background: Literal["auto", "opaque", "transparent"] | None = Field(
        None, description="auto and opaque change nothing; transparent is refused"
    )
    # OpenAI's own values, also those that it has for some of its models only.
    quality: Literal["auto", "standard", "hd", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description=UNUSED
    )
    style: Literal["vivid", "natural"] | None = Field(None, description=UNUSED)
    moderation: Literal["auto", "low"] | None = Field(None, description=UNUSED)
    user: str | None = Field(None, description=UNUSED)
    safety_identifier: str | None = Field(None, description=UNUSED)

    @field_validator("*", mode="before")
    @classmethod
    def _integers_as_in_json(cls, value: Any) -> Any:
        # JSON has one kind of numbers, and its schema calls 2.0 an integer.
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @model_validator(mode="after")
    def _steps_once(self) -> Self:
        if self.num_inference_steps is not None and self.steps not in (None, self.num_inference_steps):
            raise ValueError(f"steps is {self.steps} and num_inference_steps {self.num_inference_steps}: give one")
        return self

    def settings(self, defaults: SamplingSettings) -> SamplingSettings:
        """The defaults, with the request's own values in place of them."""
        given = self.model_dump(include=set(SETTINGS), exclude_none=True)
        if self.num_inference_steps is not None:
            given["steps"] = self.num_inference_steps
        return defaults.changed(**given)


@dataclass(frozen=True)
class Generation:
    """A request that can be met: what to sample, the factor of upscaling, and the form of the answer.

    `prompt`: a text that is still to be encoded for `sample`; None: there is none. `num_pixels` of all images. `bare`:
    the answer is the image alone, a png. `form` of image files, one of FORMATS; `quality` of jpeg and webp, out of 100.
    `stops`: velocities after which the client wants unfinished images. `routing`: it wants the experts' weights, too.
    `seconds` that the request allows; None: it has no limit. `model`: its name; None: the mixture. `alone`: the model
    is a single network, without experts to choose from.
    """

    sample: SampleRequest
    prompt: str | None
    num_pixels: int
    upscaling: int
    bare: bool
    form: str = "png"
    quality: int = 100
    stream: bool = False
    stops: tuple[int, ...] = ()
    routing: bool = False
    seconds: float | None = None
    model: str | None = None
    alone: bool = False


def resolve(
    request: GenerationRequest, config: RunConfig, defaults: SamplingSettings, info: MixtureInfo, alone: bool = False
) -> Generation:
    """The request with a model's default settings filled in. Raises RequestError with the field and its values.

    `alone`: see Generation.
    """
    count, form = request.n or 1, request.output_format or "png"
    if alone and request.strategy is not None:
        raise RequestError(f"{request.model} has no experts to choose from: leave strategy out", "strategy")
    _require_answerable(request, count, form)
    prompt, condition = _condition(request, config.data, info, count)
    seed = secrets.randbelow(2**32) if request.seed is None else request.seed
    seeds = tuple(range(seed, seed + count))
    sample = SampleRequest(seeds, condition, request.settings(defaults))
    if alone:  # the only network: no table and no router has to choose it
        cluster_B = torch.zeros(count, dtype=torch.int64)
        sample = replace(sample, settings=sample.settings.changed(strategy="oracle"), cluster_B=cluster_B)
    try:
        plan = SamplingPlan.of(sample.settings, info)
        if not alone and isinstance(plan.rule.strategy, Oracle):
            raise RequestError("strategy oracle needs images whose cluster is known: use once", "strategy")
    except SamplingError as error:
        raise RequestError(str(error), "strategy") from None
    _require_affordable(count, plan)
    stops = plan.stops(request.partial_images or 0)
    side = config.data.pixel_shape[-1]
    upscaling = _upscaling(request.size, side)
    pixels = (upscaling * side) ** 2
    most = MAX_PARTIAL_PIXELS // pixels
    if (request.partial_images or 0) > most:
        text = f"{request.partial_images} partial images have too many pixels: at most {most} of this size"
        raise RequestError(text, "partial_images")
    return Generation(
        sample,
        prompt,
        count * pixels,
        upscaling,
        bare=request.response_format == "png",
        form=form,
        quality=100 if request.output_compression is None else request.output_compression,
        stream=bool(request.stream),
        stops=stops,
        routing=bool(request.routing),
        seconds=request.timeout,
        model=request.model,
        alone=alone,
    )


def _require_answerable(request: GenerationRequest, count: int, form: str) -> None:
    """Raise RequestError for an answer of a form that can't be given."""
    is_bare, stream = request.response_format == "png", bool(request.stream)
    if is_bare and count > 1:
        raise RequestError(f"response_format png carries one image, n is {count}: use b64_json", "n")
    if stream and count > 1:
        raise RequestError(f"a stream carries one image, n is {count}: leave stream out, or send {count} requests", "n")
    if stream and is_bare:
        raise RequestError("a stream carries b64_json, not a bare png: leave one of both out", "response_format")
    if request.routing and is_bare:
        raise RequestError("routing stands in JSON, not in a bare png: leave one of both out", "routing")
    if request.partial_images and not stream:
        raise RequestError("partial_images are part of a stream: give stream true, too", "partial_images")
    if form not in FORMATS:
        raise RequestError(f"output_format {form} can't be made: use {' or '.join(FORMATS)}", "output_format")
    if is_bare and form != "png":
        text = f"response_format png carries a png, output_format is {form}: use b64_json"
        raise RequestError(text, "output_format")
    if request.background == "transparent":
        raise RequestError("background transparent can't be made: images are opaque, leave it out", "background")


def _require_affordable(count: int, plan: SamplingPlan) -> None:
    work = count * int(plan.most_rows_N.sum())
    if work > MAX_WORK:
        raise RequestError(
            f"{count} x {len(plan.velocities)} velocities of up to {int(plan.most_rows_N.max())} rows of networks are"
            f" {work}, and {MAX_WORK} is the most of a request: fewer images, steps or experts",
            "steps",
        )


def _condition(
    request: GenerationRequest, data: DataConfig, info: MixtureInfo, count: int
) -> tuple[str | None, Condition]:
    """The text to encode, if there is one, and the condition; with a text, the condition is a placeholder."""
    if data.text is None:
        return None, torch.full((count,), _label(request, data))
    if request.class_label is not None:
        raise RequestError("this model knows texts, not classes: give a prompt", "class_label")
    if request.prompt is None:
        raise RequestError("give a prompt: a text, or an empty one for an image of anything", "prompt")
    prompt = request.prompt.strip()
    return (prompt, torch.zeros(count)) if prompt else (None, info.null(count))


def _label(request: GenerationRequest, data: DataConfig) -> int:
    names = list(data.class_names)
    listed = ", ".join(names[:MAX_LISTED]) + (", ... (all at /v1/models)" if len(names) > MAX_LISTED else "")
    listing = f"prompt: one of {listed}; class_label: 0 to {len(names) - 1}"
    if request.prompt is None and request.class_label is None:
        raise RequestError(f"name the class by prompt or by class_label (neither was given); {listing}", "prompt")
    if request.class_label is not None:
        # OpenAI's clients can't leave the prompt out.
        if (request.prompt or "").strip():
            raise RequestError(f"name the class by prompt or by class_label (both were given); {listing}", "prompt")
        if request.class_label >= len(names):
            raise RequestError(f"unknown class_label {request.class_label}; {listing}", "class_label")
        return request.class_label
    assert request.prompt is not None
    prompt = request.prompt.strip()
    if not prompt:
        return len(names)
    label = index_of(prompt, names)
    if label is None:
        raise RequestError(f"unknown class {prompt[:60]!r}; {listing}", "prompt", "unknown_class")
    return label


def _upscaling(size: str | None, image_size: int) -> int:
    if size in (None, "auto"):
        return 1
    assert size is not None
    sides = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", size)
    width, height = (int(side) for side in sides.groups()) if sides else (0, -1)
    largest = max(1, MAX_PIXELS // image_size) * image_size
    if width != height or not 0 < width <= largest or width % image_size:
        raise RequestError(
            f"size {size[:20]!r} can't be made: use {image_size}x{image_size} or a multiple of it"
            f" up to {largest}x{largest}",
            "size",
        )
    return width // image_size
