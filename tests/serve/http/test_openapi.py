"""The OpenAPI description: a request that is met fits its schema, and a refusal the one of its status. No Ray."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from ddm_ray.serve.http.generation import GenerationRequest, RequestError
from ddm_ray.serve.http.openai_errors import OF_ANY_ROUTE
from tests.serve.http.test_any_request import SOUND_FIELDS, WILD_FIELDS
from tests.serve.http.test_http_app import GENERATIONS, Served, served

pytestmark = pytest.mark.contract

__all__ = ["served"]


def is_met(served: Served, body: dict[str, Any]) -> bool:
    try:
        served.service.resolve(GenerationRequest.model_validate(body))
    except (RequestError, ValidationError):
        return False
    return True


@pytest.fixture(scope="module")
def described(served: Served) -> dict[str, Any]:
    return served.ask("GET", "/openapi.json").json()


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@settings(max_examples=300, deadline=None)
@given(st.builds(lambda sound, wild: {"prompt": "7"} | sound | wild, SOUND_FIELDS, st.just({}) | WILD_FIELDS))
def test_a_request_that_is_met_fits_the_schema(served: Served, described: dict[str, Any], body: dict[str, Any]) -> None:
    schema = validator(described["components"]["schemas"]["GenerationRequest"])
    assert schema.is_valid(body) or not is_met(served, body)


def test_a_request_of_another_type_or_range_does_not_fit(described: dict[str, Any]) -> None:
    schema = validator(described["components"]["schemas"]["GenerationRequest"])
    assert schema.is_valid({"prompt": "7", "steps": 5, "solver": "heun", "stream": None})
    for field in ({"steps": 0}, {"n": 11}, {"solver": "rk5"}, {"stream": "yes"}, {"unknown": 1}):
        assert not schema.is_valid({"prompt": "7"} | field)


def test_every_route_says_how_it_refuses(described: dict[str, Any]) -> None:
    open_to_all = {"/healthz", "/readyz"}
    for path, operations in described["paths"].items():
        for operation in operations.values():
            statuses = operation["responses"].keys()
            assert path in open_to_all or {str(status) for status in OF_ANY_ROUTE} <= statuses
            assert "422" not in statuses


def test_every_error_is_described_as_it_is(served: Served, described: dict[str, Any]) -> None:
    components = {"components": described["components"]}
    refusals = described["paths"][GENERATIONS]["post"]["responses"]
    for body, status in (({"prompt": "cat"}, "400"), ({"prompt": "7", "model": "x"}, "404")):
        schema = refusals[status]["content"]["application/json"]["schema"] | components
        answer = served.generate(**body)
        assert str(answer.status_code) == status
        validator(schema).validate(answer.json())
        assert not validator(schema).is_valid({"error": {"message": "no"}})
