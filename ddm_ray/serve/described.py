"""The OpenAPI description: routes, forms of answers, and which requests this run can meet, as far as JSON Schema says.

It can't compare fields: an interval's ends, work (`MAX_WORK`), and time that is too short are described in words alone.
"""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from ddm_ray.config import DataConfig
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.serve.generation import MANY_PARTIAL_IMAGES, largest_side, model_names, most_partial_images
from ddm_ray.serve.service import Service


class Error(BaseModel):
    """OpenAI's error; `param` is the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's error object."""

    error: Error


def _refusal(text: str) -> dict[str, Any]:
    return {"model": ErrorAnswer, "description": text}


REFUSALS: dict[int | str, dict[str, Any]] = {
    400: _refusal("A field that can't be met, or no JSON"),
    401: _refusal("No token of this server's"),
    404: _refusal("Another model"),
    408: _refusal("The body came too slowly, or the request's time is over"),
    413: _refusal("The body is too large"),
    421: _refusal("Another host's name, where only this machine may ask"),
    429: _refusal("More is asked for than can be made in time; see Retry-After"),
    500: _refusal("A fault of the server"),
    503: _refusal("No expert is there; see Retry-After"),
}
OF_ANY_ROUTE: dict[int | str, dict[str, Any]] = {status: REFUSALS[status] for status in (401, 408, 413, 421, 500)}
IMAGES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The images; a bare image for response_format png; events for stream",
        "content": {"application/json": {}, "image/png": {}, "text/event-stream": {}},
    }
}
AWAY: dict[int | str, dict[str, Any]] = {
    503: {"description": "Deployments without a replica are named", "content": {"application/json": {}}}
}
NULL = {"type": "null"}
BELOW_1 = r"0\.0{0,9}[1-9][0-9]{0,9}"
ABOVE_0 = rf"({BELOW_1}|[1-9][0-9]{{0,9}}(\.[0-9]{{1,10}})?)"
TIMES = f"^(uniform|cosine|shifted-{ABOVE_0})$"
"""Numbers as one writes them: of those that are taken, ones with a needless zero or more digits are missing."""


def description(http: FastAPI, service: Service) -> dict[str, Any]:
    """The description of an application, with the requests of its run."""
    described = FastAPI.openapi(http)
    for path in described["paths"].values():
        for operation in path.values():
            # FastAPI takes this status for granted, and nothing here sends it.
            operation["responses"].pop("422", None)
    models = list(model_names(service.config, service.dense_network))
    request = described["components"]["schemas"]["GenerationRequest"]
    narrow(request, service.config.data, service.sampler.info, models)
    return described


def narrow(schema: dict[str, Any], data: DataConfig, info: MixtureInfo, models: list[str]) -> None:
    """Narrow the schema of a request to what a run of these data, of these models' names, can meet."""
    side = data.pixel_shape[-1]
    sizes = {f"{each}x{each}": each for each in range(side, largest_side(side) + 1, side)} | {"auto": side}
    properties = schema["properties"]
    narrowed: dict[str, dict[str, Any]] = {
        "model": {"enum": models},
        "size": {"enum": list(sizes)},
        "strategy": {"pattern": strategies(info.num_experts)},
        "times": {"pattern": TIMES},
    }
    if data.text is None:
        narrowed["prompt"] = {"enum": [*data.class_names, ""]}
        narrowed["class_label"] = {"maximum": len(data.class_names) - 1}
    for name, bounds in narrowed.items():
        properties[name]["anyOf"][0] |= bounds
    at_the_end = {"stream": _unset(False), "partial_images": _unset(0)}
    alone = {"n": _unset(1)}
    streams = [
        _with("stream", {"const": True}, **alone, response_format=_unset("b64_json"), **_partial(most, sizes))
        for most in MANY_PARTIAL_IMAGES
    ]
    schema["allOf"] = [
        _conditions(data),
        {
            "anyOf": [
                {"properties": {"response_format": _unset("b64_json"), **at_the_end}},
                _with("response_format", {"const": "png"}, **alone, **at_the_end, routing=_unset(False)),
                *streams,
            ]
        },
        {"anyOf": [{"properties": {"steps": NULL}}, {"properties": {"num_inference_steps": NULL}}]},
    ]
    if len(models) > 1:  # the dense tier's network by itself has no experts to choose from
        by_experts = {"properties": {"model": _unset(models[0])}}
        schema["allOf"].append({"anyOf": [{"properties": {"strategy": NULL}}, by_experts]})


def strategies(num_experts: int) -> str:
    """A pattern of the strategies that a request may name to so many experts: those of the grammar but oracle."""
    count = "|".join(str(count + 1) for count in range(num_experts))
    return (
        f"^(once|full|(top|sample)-({count})|sticky(-0(\\.[0-9]{{1,10}})?)?|threshold-{BELOW_1}"
        f"|nucleus-(1|{BELOW_1})(-{ABOVE_0})?)$"
    )


def _conditions(data: DataConfig) -> dict[str, Any]:
    if data.text is not None:
        return _with("prompt", {"type": "string"}, class_label=NULL)
    by_name = _with("prompt", {"type": "string"}, class_label=NULL)
    return {"anyOf": [by_name, _with("class_label", {"type": "integer"}, prompt=_unset(""))]}


def _partial(most: int, sizes: dict[str, int]) -> dict[str, Any]:
    fitting = [size for size, side in sizes.items() if most_partial_images(side) >= most]
    return {"partial_images": {"maximum": most}, "size": _unset(*fitting) if "auto" in fitting else {"enum": fitting}}


def _unset(*values: Any) -> dict[str, Any]:
    """One of these values, or null; a field may be left out, too."""
    return {"enum": [*values, None]}


def _with(name: str, value: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"required": [name], "properties": {name: value, **others}}
