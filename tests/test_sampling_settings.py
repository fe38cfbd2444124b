"""The one record of sampling settings: what it refuses, and that every field of it is an option of every door."""

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ddm_ray import cli
from ddm_ray.config import SamplingSettings, invalid_fields, load_recipe
from ddm_ray.serve.http.generation import GenerationRequest

VALUES = {
    "strategy": "nucleus-0.9-0.5",
    "solver": "heun",
    "steps": 3,
    "times": "shifted-2",
    "guidance_scale": 2.5,
    "guidance_interval": (0.2, 0.6),
    "guidance_kind": "per-expert",
    "router_temperature": 1.5,
}
"""Another value than the default for every field."""
FIELDS = SamplingSettings.model_fields


def refusal(**fields: object) -> str:
    with pytest.raises(ValidationError) as refused:
        SamplingSettings(**fields)
    return invalid_fields(refused.value)


def test_every_field_has_a_description_and_is_tried_here() -> None:
    assert FIELDS.keys() == VALUES.keys()
    assert all(field.description and VALUES[name] != field.default for name, field in FIELDS.items())


def test_every_field_is_an_option_of_the_command_line() -> None:
    done = CliRunner().invoke(cli.main, ["sample", "--help"])
    assert done.exit_code == 0
    for name, field in FIELDS.items():
        assert f"--{name.replace('_', '-')} " in done.output
        assert field.description.split()[0] in done.output


def test_every_field_is_one_of_an_http_request() -> None:
    request = GenerationRequest.model_validate({"prompt": "1", **VALUES, "guidance_interval": [0.2, 0.6]})
    assert request.settings(SamplingSettings()) == SamplingSettings(**VALUES)
    assert GenerationRequest(prompt="1").settings(SamplingSettings(**VALUES)) == SamplingSettings(**VALUES)
    schema = GenerationRequest.model_json_schema()["properties"]
    assert all(schema[name]["description"] == field.description for name, field in FIELDS.items())


def test_every_field_is_one_of_a_runs_configuration() -> None:
    overrides = tuple(f"sample.{name}={list(v) if isinstance(v, tuple) else v}" for name, v in VALUES.items())
    config = load_recipe("tiny", overrides)
    assert config.sample == SamplingSettings(**VALUES)
    assert SamplingSettings(**config.model_dump(mode="json")["sample"]) == config.sample


def test_the_kind_of_guidance_is_read_under_the_name_that_it_had() -> None:
    assert load_recipe("tiny", ("sample.guidance=per-expert",)).sample.guidance_kind == "per-expert"
    assert SamplingSettings().changed(guidance="per-expert") == SamplingSettings(guidance_kind="per-expert")
    with pytest.raises(ValidationError):
        SamplingSettings().changed(guidance="per-expert", guidance_kind="per-expert")
    with pytest.raises(ValidationError, match="Input should be 'mixture' or 'per-expert'"):
        SamplingSettings().changed(guidance=3.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "best"}, "strategy: unknown strategy 'best': use once, full, oracle, top-k"),
        (
            {"solver": "rk5"},
            "solver: Input should be 'euler', 'heun', 'midpoint', 'ab2', 'ab3', 'rk4' or",
        ),
        ({"steps": 0}, "steps: Input should be greater than 0, got 0"),
        ({"steps": "2"}, "steps: Input should be a valid integer, got '2'"),
        ({"steps": np.array([2])}, "steps: Input should be a valid integer"),
        ({"times": "shifted-0.0"}, "times: unknown times 'shifted-0.0'"),
        ({"times": "log"}, "times: unknown times 'log': use uniform, cosine or shifted-S with a number S above 0"),
        ({"guidance_scale": float("nan")}, "guidance_scale: Input should be a finite number"),
        ({"guidance_interval": (0.7, 0.3)}, "guidance_interval: (0.7, 0.3): the smaller time comes first"),
        ({"guidance_interval": (0, 1.5)}, "guidance_interval.1: Input should be less than or equal to 1"),
        ({"guidance_kind": "both"}, "guidance_kind: Input should be 'mixture' or 'per-expert', got 'both'"),
        ({"router_temperature": 0}, "router_temperature: Input should be greater than 0, got 0"),
        ({"colour": "red"}, "colour: unknown key"),
    ],
)
def test_what_does_not_fit_is_named(fields: dict[str, object], message: str) -> None:
    assert refusal(**fields).startswith(message)
    with pytest.raises(ValidationError):
        SamplingSettings().changed(**fields)


def test_numbers_may_be_numpys_and_torchs() -> None:
    for number, pair in ((np.int32(2), np.array([0.0, 0.5])), (torch.tensor(2), torch.tensor([0.0, 0.5]))):
        converted = SamplingSettings(steps=number, guidance_scale=number, guidance_interval=pair)
        assert converted == SamplingSettings(steps=2, guidance_scale=2.0, guidance_interval=(0.0, 0.5))


@settings(deadline=None)
@given(st.from_regex(r"[a-z]+(-[0-9.]{1,4}){0,2}"))
def test_any_name_is_a_strategy_or_is_refused_in_invalid_fields(name: str) -> None:
    refusals = []
    try:
        SamplingSettings(strategy=name)
    except ValidationError as error:
        refusals.append(invalid_fields(error))
    assert all(message.isprintable() for message in refusals)
