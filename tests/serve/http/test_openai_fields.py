"""Fields of OpenAI, as its client has them: values that change nothing are taken, others are met or refused. No Ray."""

import asyncio
import base64
import io
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from openai import AsyncOpenAI
from openai.types import ImagesResponse
from openai.types.image_generate_params import ImageGenerateParamsNonStreaming
from PIL import Image

from ddm_ray.serve.http.generation import GenerationRequest
from ddm_ray.serve.http.guard import Guard
from tests.serve.conftest import pixels
from tests.serve.http.test_http_app import Served, client, error_of, served

__all__ = ["served"]


def literals(kind: Any) -> list[Any]:
    """All values of the Literals in a type."""
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    return [value for each in get_args(kind) for value in literals(each)]


# What isn't inert of the values that OpenAI's client knows: the size, formats that we make, and what is refused below.
NOT_INERT = {("output_format", "jpeg"), ("output_format", "webp")}
REFUSED = {
    ("output_format", "gif"),
    ("output_format", "svg"),
    ("background", "transparent"),
    ("response_format", "url"),
}
OF_OPENAI = {
    name: choices
    for name, kind in get_type_hints(ImageGenerateParamsNonStreaming).items()
    if name not in ("model", "size", "complexity") and (choices := literals(kind))
}
"""Values that OpenAI's client knows, by their fields; `complexity` is of svg alone."""


def test_values_of_openai_that_change_nothing_are_taken(served: Served) -> None:
    assert {"quality", "style", "background", "moderation", "output_format", "response_format"} <= OF_OPENAI.keys()
    inert = [(name, value) for name, values in OF_OPENAI.items() for value in values]
    inert += [("user", "me"), ("safety_identifier", "me"), ("stream", False), ("partial_images", 0), ("size", "auto")]
    inert += [("output_compression", 0), ("output_compression", 100)]
    inert += [(name, None) for name in GenerationRequest.model_fields if name not in ("prompt", "seed")]
    right = served.generate(prompt="7", seed=1).json()
    for name, value in inert:
        if (name, value) not in NOT_INERT | REFUSED:
            answer = served.generate(prompt="7", seed=1, **{name: value})
            assert answer.status_code == 200 and answer.json()["data"] == right["data"], (name, value)


@pytest.mark.parametrize(("name", "value"), sorted(REFUSED))
def test_a_value_of_openai_that_would_change_the_image_is_refused_by_name(
    served: Served, name: str, value: str
) -> None:
    assert value in OF_OPENAI[name]
    answer = served.generate(prompt="7", **{name: value})
    error = error_of(answer)
    assert answer.status_code == 400 and error["param"] == name and name in error["message"]


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_an_image_has_the_format_that_is_asked_for(served: Served, form: str) -> None:
    def image(**fields: Any) -> Image.Image:
        (item,) = served.generate(prompt="7", seed=1, size="256x256", output_format=form, **fields).json()["data"]
        return Image.open(io.BytesIO(base64.b64decode(item["b64_json"])))

    best, small = image(), image(output_compression=5)
    assert best.format == small.format == form.upper() and best.size == (256, 256)
    assert (np.asarray(best) == np.asarray(small)).all() == (form == "png")
    exact = pixels(served.generate(prompt="7", seed=1, size="256x256").json()["data"][0]["b64_json"])
    assert np.abs(np.asarray(best.convert("L")).astype(int) - exact).mean() < 2


def test_openais_client_reads_every_field_of_an_answer(served: Served) -> None:
    async def asked() -> tuple[ImagesResponse, list[Any]]:
        async with client(Guard(served.app)) as session:
            openai = AsyncOpenAI(base_url="http://served/v1", api_key="any", max_retries=0, http_client=session)
            fields: dict[str, Any] = {"prompt": "7", "quality": "hd", "style": "natural", "output_format": "webp"}
            made = await openai.images.generate(**fields, size="16x16")
            stream = await openai.images.generate(**fields, partial_images=1, stream=True)
            return made, [event async for event in stream]

    made, (part, end) = asyncio.run(asked())
    assert (made.size, made.output_format, made.background, made.quality) == ("16x16", "webp", "opaque", "high")
    for answer in (made, part, end):
        type(answer).model_validate(answer.model_dump(), strict=True)  # its client itself checks nothing
    assert made.created > 0 and made.usage is not None and made.usage.total_tokens == end.usage.total_tokens == 0
    assert (end.size, end.output_format) == (part.size, part.output_format) == ("8x8", "webp")
