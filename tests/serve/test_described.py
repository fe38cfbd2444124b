"""The OpenAPI description: a request that fits its schema is met, and one that doesn't is refused. No Ray."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from ddm_ray.config import load_recipe
from ddm_ray.sampling.request import MixtureInfo
from ddm_ray.serve.described import narrow
from ddm_ray.serve.generation import GenerationRequest, RequestError, resolve
from tests.random_run import TEXTS
from tests.serve.test_http_app import GENERATIONS, Served, served

__all__ = ["served"]

STRATEGIES = [
    "once", "full", "oracle", "top-1", "top-2", "top-3", "top-0", "sample-2", "sample-9", "sticky", "sticky-0",
    "sticky-0.5", "sticky-1", "threshold-0.05", "threshold-1", "threshold-0", "nucleus-0.9", "nucleus-1",
    "nucleus-1.5", "nucleus-0", "nucleus-0.9-0.7", "nucleus-0.9-0", "nucleus-0.9-10", "best", "top",
]  # fmt: skip
TIMES = [
    "uniform", "cosine", "shifted-3", "shifted-0.5", "shifted-0", "shifted", "shifted-10.25", "linear",
]  # fmt: skip
SIZES = [
    "8x8", "16x16", "auto", "576x576", "584x584", "1024x1024", "1032x1032", "2048x2048", "2056x2056", "9x9", "8x16",
    "08x08", "0x0", "large",
]  # fmt: skip
# Values of each field that can be met, and others that can't. What JSON Schema can't say is left out: an interval's
# ends in their order, work, and a timeout that is too short.
VALUES: dict[str, list[Any]] = {
    "prompt": ["7", "", "cat", 7],
    "class_label": [0, 9, 9.0, 10, -1, "1"],
    "model": ["tiny", "dall-e-3"],
    "n": [1, 2, 2.0, 2.5, 10, 11, 0, True, "1"],
    "size": SIZES,
    "response_format": ["b64_json", "png", "url"],
    "seed": [0, 2**53 - 11, 2**53, -1],
    "strategy": STRATEGIES,
    "times": TIMES,
    "steps": [1, 5, 5.0, 0],
    "num_inference_steps": [2, 0],
    "solver": ["heun", "rk4"],
    "guidance_scale": [0, 1.5, -100, 101],
    "guidance_interval": [[0.2, 0.8], [0, 1.5], [0.5]],
    "router_temperature": [0.001, 1, 0],
    "stream": [True, False],
    "partial_images": [0, 1, 4, 5, 16, 17, 50, 51],
    "routing": [True, False],
    "quality": ["auto", "hd"],
    "output_compression": [100, 50],
    "unknown": [1],
}
# Mostly few fields, so that some requests can be met.
BODIES = st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=5).flatmap(
    lambda names: st.fixed_dictionaries({name: st.none() | st.sampled_from(VALUES[name]) for name in names})
)
ASKED = st.builds(
    lambda body, prompt: ({"prompt": "7"} if prompt else {}) | body, BODIES, st.sampled_from([True] * 3 + [False])
)


def is_met(served: Served, body: dict[str, Any]) -> bool:
    try:
        served.service.resolve(GenerationRequest.model_validate(body))
    except (RequestError, ValidationError):
        return False
    return True


@pytest.fixture(scope="module")
def schema(described: dict[str, Any]) -> Draft202012Validator:
    return validator(described["components"]["schemas"]["GenerationRequest"])


@pytest.fixture(scope="module")
def described(served: Served) -> dict[str, Any]:
    return served.ask("GET", "/openapi.json").json()


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@settings(max_examples=500)
@given(ASKED)
@example({})
@example({"prompt": None})
@example({"class_label": 3, "prompt": ""})
@example({"prompt": "7", "stream": True, "size": "1024x1024", "partial_images": 16})
@example({"prompt": "7", "stream": True, "size": "1032x1032", "partial_images": 16})
@example({"prompt": "7", "stream": True, "size": "576x576", "partial_images": 50})
@example({"prompt": "7", "stream": True, "size": None, "partial_images": 50})
@example({"prompt": "7", "response_format": "png", "routing": True})
@example({"prompt": "7", "steps": 5, "num_inference_steps": 2})
def test_a_request_is_met_if_it_fits_the_schema(
    served: Served, schema: Draft202012Validator, body: dict[str, Any]
) -> None:
    assert schema.is_valid(body) == is_met(served, body)


@pytest.mark.parametrize("name", sorted(VALUES.keys() - {"unknown", "class_label"}))
def test_each_value_is_met_by_itself_or_not(served: Served, schema: Draft202012Validator, name: str) -> None:
    bodies = [{"prompt": "7", "stream": name == "partial_images" or None} | {name: value} for value in VALUES[name]]
    met = [is_met(served, body) for body in bodies]
    assert met == [schema.is_valid(body) for body in bodies] and any(met)


def test_a_run_of_texts_asks_for_one() -> None:
    config = load_recipe("laion256-k8", TEXTS)
    info = MixtureInfo(2, config.data.shape, None, None, trained_null=False)
    schema = GenerationRequest.model_json_schema()
    narrow(schema, config.data, info, ["texts"])
    for body in ({}, {"prompt": None}, {"class_label": 1}, {"prompt": "a", "class_label": 1}, {"prompt": "a bird"}):
        try:
            resolve(GenerationRequest(**body), config, config.sample, info)
        except RequestError:
            met = False
        else:
            met = True
        assert validator(schema).is_valid(body) == met == (body == {"prompt": "a bird"})


def test_the_dense_network_by_itself_takes_no_strategy(described: dict[str, Any]) -> None:
    config = load_recipe("tiny")
    schema = GenerationRequest.model_json_schema()
    narrow(schema, config.data, MixtureInfo(2, (1, 8, 8), 10, None), ["tiny", "tiny-monolith"])
    fits = [
        validator(schema).is_valid({"prompt": "7", "model": model, "strategy": strategy})
        for model in ("tiny", "tiny-monolith", None)
        for strategy in ("full", None)
    ]
    assert fits == [True, True, False, True, True, True]


def test_every_error_is_described_as_it_is(served: Served, described: dict[str, Any]) -> None:
    components = {"components": described["components"]}
    refusals = described["paths"][GENERATIONS]["post"]["responses"]
    for body, status in (({"prompt": "cat"}, "400"), ({"prompt": "7", "model": "x"}, "404")):
        schema = refusals[status]["content"]["application/json"]["schema"] | components
        answer = served.generate(**body)
        assert str(answer.status_code) == status
        validator(schema).validate(answer.json())
        assert not validator(schema).is_valid({"error": {"message": "no"}})
