"""Responses: image files, OpenAI's images response and its events. No Ray, no HTTP.

Shapes: CHW image, S steps.
"""

import base64
import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from PIL import Image
from torch import Tensor

from ddm_ray.config import RunConfig, SamplingSettings
from ddm_ray.pictures.files import to_file
from ddm_ray.pictures.images import to_pil, to_unit
from ddm_ray.sampling.request import SampleResult
from ddm_ray.serve.engine.segments import Sampled
from ddm_ray.serve.engine.versions import expert_name
from ddm_ray.serve.http.generation import Generation


def image_file(image_CHW: Tensor, upscaling: int, form: str = "png", quality: int = 100) -> bytes:
    """File of an image (grey or RGB) in [-1, 1], clipped; each pixel becomes upscaling x upscaling ones."""
    (image,) = to_pil(to_unit(image_CHW[None]))
    image = image.resize((image.width * upscaling, image.height * upscaling), Image.Resampling.NEAREST)
    return to_file(image, form, quality)


def stretches(experts_S: list[int]) -> list[dict[str, int]]:
    """Stretches of steps under one (heaviest) expert: [{"expert": 2, "steps": 25}]."""
    return [{"expert": expert, "steps": len(list(group))} for expert, group in groupby(experts_S)]


def model_entry(
    name: str, config: RunConfig, credit: str | None, clusters: Sequence[int], defaults: SamplingSettings
) -> dict[str, Any]:
    """OpenAI's model object, and beside it what a client may want to know before it asks for images.

    `classes`: names for a prompt, null where it is any text; `size` of images; `credit` for the pictures that it learnt
    from, if they ask for one; `defaults` of sampling. `clusters`: the experts' numbers.
    """
    data = config.data
    _, height, width = data.pixel_shape
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "ddm-ray",
        "experts": [expert_name(cluster) for cluster in clusters],
        "classes": list(data.class_names) if data.text is None else None,
        "size": f"{width}x{height}",
        "credit": credit,
        "defaults": defaults.model_dump(mode="json"),
    }


def images_response(generation: Generation, sampled: Sampled, model: str, created: int) -> dict[str, Any]:
    """OpenAI's images response, and beside it model, strategy, and per image the experts that sampled it.

    `routing`: per image the weights of all experts at each step, if the request asks for them, and `routing_experts`:
    these experts' names. `degraded`: names of
    the experts that were left out, if any. `truncated`: the prompt's number of tokens and of those kept, unless all
    are. A single network has neither strategy nor experts.
    """
    request, result = generation.sample, sampled.result
    encoded = [base64_image(image_CHW, generation) for image_CHW in result.images_BCHW]
    return {
        "created": created,
        **image_fields(result.images_BCHW[0], generation),
        "usage": USAGE,
        "data": [{"b64_json": b64_json, "seed": seed} for b64_json, seed in zip(encoded, request.seeds, strict=True)],
        "model": model,
        "strategy": None if generation.alone else request.settings.strategy,
        "experts": expert_stretches(generation, sampled),
        **routing_fields(generation, result, [routing(result, image) for image in range(len(encoded))]),
        **degraded(sampled),
    }


def routing(result: SampleResult, image: int) -> list[list[float]]:
    """Weights of the experts at each step of an image, (S, K), to four digits."""
    return [[round(weight, 4) for weight in weights_K] for weights_K in result.routing_SBK[:, image].tolist()]


def routing_fields(generation: Generation, result: SampleResult, weights: list[Any]) -> dict[str, Any]:
    """The weights of all experts and these experts' names, if the request asks for them."""
    if not generation.routing:
        return {}
    names = [] if generation.alone else [expert_name(number) for number in result.clusters]
    return {"routing": weights, "routing_experts": names}


def expert_stretches(generation: Generation, sampled: Sampled) -> list[list[dict[str, int]]]:
    """Per image the experts that sampled it, in stretches of steps; none for a single network."""
    if generation.alone:
        return [[] for _ in sampled.result.images_BCHW]
    return [stretches(numbers_S) for numbers_S in sampled.result.numbers_SB.T.tolist()]


def degraded(sampled: Sampled) -> dict[str, Any]:
    """Fields on how the images differ from the request, mostly none: experts left out, a prompt cut."""
    fields: dict[str, Any] = {}
    if sampled.away:
        fields["degraded"] = [expert_name(number) for number in sampled.away_numbers]
    if sampled.cut:
        kept, num_tokens = sampled.cut
        fields["truncated"] = {"tokens": num_tokens, "kept": kept}
    return fields


def image_fields(image_CHW: Tensor, generation: Generation) -> dict[str, str]:
    """OpenAI's fields on what an image is like. There is one quality."""
    _, height, width = image_CHW.shape
    return {
        "size": f"{width * generation.upscaling}x{height * generation.upscaling}",
        "quality": "high",
        "background": "opaque",
        "output_format": generation.form,
    }


def stream_event(kind: str, image_CHW: Tensor, generation: Generation, created: int, **others: Any) -> bytes:
    """One server-sent event of a stream, as OpenAI's: partial_image or completed."""
    fields = {
        "type": f"image_generation.{kind}",
        "b64_json": base64_image(image_CHW, generation),
        "created_at": created,
        **image_fields(image_CHW, generation),
        **others,
    }
    return f"event: {fields['type']}\ndata: {json.dumps(fields)}\n\n".encode()


USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}
"""Counts of tokens, which OpenAI's answers and completed events have."""


def base64_image(image_CHW: Tensor, generation: Generation) -> str:
    file = image_file(image_CHW, generation.upscaling, generation.form, generation.quality)
    return base64.b64encode(file).decode()
