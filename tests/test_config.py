"""Recipes load, settings apply, and every mistake is one line that names the field and what to do."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.config import load_recipe, parse_config, recipe_names
from ddm_ray.errors import ConfigError


def refusal(*changes: str, recipe: str = "tiny") -> str:
    """The one line that a recipe with these settings is refused with."""
    with pytest.raises(ConfigError) as failure:
        load_recipe(recipe, changes)
    message = str(failure.value)
    assert message.isprintable(), "more than one line"
    return message


def test_the_demo_and_the_tests_have_a_recipe() -> None:
    assert {"digits", "tiny"} <= set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_loads_and_survives_json(name: str) -> None:
    config = load_recipe(name)
    assert config.name == name
    assert config.expert.train.global_batch % config.partition.num_clusters == 0
    assert parse_config(json.loads(json.dumps(config.model_dump(mode="json"))), "here") == config


def test_settings_apply_in_order() -> None:
    config = load_recipe(
        "tiny",
        (
            "expert.train.steps=7",
            "name=my run",
            "expert.train.learning_rate=1e-3",
            "expert.train.steps=9",
            "embedder={kind: pixels, dim: 3}",
            "expert.model.analytic_skip=",
            "evaluate.strategies=[once]",
        ),
    )
    plain = load_recipe("tiny")
    assert config.name == "my run"
    assert config.expert.train.steps == 9
    assert config.expert.train.learning_rate == 1e-3
    assert config.embedder.dim == 3
    assert config.expert.model.analytic_skip is None
    assert config.evaluate.strategies == ("once",)
    assert config.router == plain.router
    assert config.data == plain.data


def test_a_setting_may_name_a_part_that_the_recipe_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.yml"
    fields = load_recipe("tiny").model_dump(mode="json", exclude={"sample"})
    path.write_text(json.dumps(fields))
    assert load_recipe(str(path), ("sample.steps=3",)).sample.steps == 3


def test_a_config_never_changes() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe("tiny").expert.train.steps = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["expert.train.stesp=5"], "expert.train.stesp: unknown key"),
        (["colour=red"], "colour: unknown key"),
        (["expert.train.steps=many"], "expert.train.steps: Input should be a valid integer"),
        (["expert.train.steps=0"], "expert.train.steps: Input should be greater than 0, got 0"),
        (["expert.train.steps=1.5"], "expert.train.steps: Input should be a valid integer"),
        (["expert.train.steps="], "expert.train.steps: Input should be a valid integer, got None"),
        (["expert.train=5"], "expert.train: Input should be a valid dictionary"),
        (["name=7"], "name: Input should be a valid string, got 7"),
        (["name=''"], "name: String should have at least 1 character"),
        (["data.class_names=[]"], "data.class_names: Tuple should have at least 1 item"),
        (["data.heldout=1"], "data.heldout: Input should be less than 1, got 1"),
        (["data.source=cifar"], "data.source: Input should be 'digits', got 'cifar'"),
        (["expert.train.precision=fp16"], "expert.train.precision: Input should be 'fp32' or 'bf16'"),
        (["expert.train.learning_rate=0"], "expert.train.learning_rate: Input should be greater than 0"),
        (["expert.train.learning_rate=.inf"], "expert.train.learning_rate: Input should be a finite number"),
        (["expert.train.ema_decay=1.0"], "expert.train.ema_decay: Input should be less than 1"),
        (["expert.train.betas=[0.9, 1.0]"], "expert.train.betas.1: Input should be less than 1"),
        (["expert.train.condition_dropout=-0.1"], "expert.train.condition_dropout: Input should be greater"),
        (["sample.guidance_scale=.nan"], "sample.guidance_scale: Input should be a finite number"),
        (["sample.solver=rk4"], "sample.solver: Input should be 'euler', 'heun' or 'ab2', got 'rk4'"),
        (
            ["expert.train.global_batch=33"],
            "expert.train.global_batch (33) must be a multiple of partition.num_clusters (2)",
        ),
        (["partition.num_fine=1"], "partition: num_fine (1) must be at least num_clusters (2)"),
        (["expert.model.heads=3"], "expert.model: width (32) must be a multiple of heads (3) and of 4"),
        (["expert.model.width=30"], "expert.model: width (30) must be a multiple of heads (2) and of 4"),
        (["expert.model.patch_size=3"], "expert.model.patch_size (3) must divide data.image_size (8)"),
        (["router.model.patch_size=3"], "router.model.patch_size (3) must divide data.image_size (8)"),
        (["a=1", "b=2", "sample.steps=x"], "a: unknown key; b: unknown key"),
        (['"a\\nb"=1'], "unknown key"),
    ],
)
def test_what_does_not_fit_is_named(changes: list[str], told: str) -> None:
    message = refusal(*changes)
    assert message.startswith(f"recipe tiny with {' '.join(changes)}: ")
    assert told in message


@pytest.mark.parametrize(
    "setting", ["", "=", "=5", "expert.train.steps", ".steps=5", "expert..steps=5", "expert.train.=5"]
)
def test_a_setting_of_another_form_is_shown_the_form(setting: str) -> None:
    message = refusal(setting)
    assert message == f"--set {setting!r}: write it as a.b=value, e.g. --set expert.train.steps=500"


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("name.first=x", "'name' has no fields below it"),
        ("data.class_names.0=x", "'class_names' has no fields below it"),
        ("name=[1, 2", "not YAML"),
        ("name=2026-99-99", "not YAML: month must be in 1..12"),
        ("name=!!python/object:os.system x", "not YAML: could not determine a constructor"),
    ],
)
def test_a_setting_that_cannot_be_applied(setting: str, told: str) -> None:
    message = refusal(setting)
    assert message.startswith(f"--set {setting!r}: ")
    assert told in message


@settings(deadline=None)
@given(st.text(max_size=30), st.sampled_from(["name", "expert.train.steps", "embedder.model_args", "x", ""]))
def test_any_setting_applies_or_is_refused_in_one_line(text: str, field: str) -> None:
    for setting in (text, f"{field}={text}", f"{text}={field}"):
        try:
            load_recipe("tiny", (setting,))
            told = "applied"
        except ConfigError as error:
            told = str(error)
        assert len(told.splitlines()) == 1


@pytest.mark.parametrize("recipe", ["imagenet", "missing.yaml", "", "digits.txt", "."])
def test_an_unknown_recipe_lists_the_shipped_ones(recipe: str) -> None:
    message = refusal(recipe=recipe)
    assert message == (f"recipe {recipe!r} is neither a shipped one ({', '.join(recipe_names())}) nor a .yaml file")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"name: [1", "not YAML: while parsing a flow sequence"),
        (b"name: a\n\tb: c\n", "not YAML"),
        (b"\xff\xfe\x00", "not YAML"),
        (b"\x89PNG\r\n", "not YAML"),
        (b"", "holds no fields"),
        (b"- name: a\n", "holds no fields"),
        (b"just words", "holds no fields"),
        (b"name: mine\n", "data: Field required; partition: Field required; expert: Field required"),
    ],
)
@pytest.mark.parametrize("changes", [(), ("a=1",)])
def test_a_broken_recipe_file_is_named(tmp_path: Path, content: bytes, told: str, changes: tuple[str, ...]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    message = refusal(*changes, recipe=str(path))
    assert message.startswith(f"recipe {path}")
    assert told in message


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_fields_of_any_form_are_refused_in_one_line(fields: object) -> None:
    with pytest.raises(ConfigError) as failure:
        parse_config(fields, "run.json")
    assert len(str(failure.value).splitlines()) == 1
    assert str(failure.value).startswith("run.json: ")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sample.strategy=top-3", "sample.strategy: 'top-3' is not once, full, or top-1 to top-2"),
        ("evaluate.strategies=[monolith]", "evaluate.strategies: 'monolith' is not once, full, or top-1 to top-2"),
        ("evaluate.strategies=[full, full]", "evaluate.strategies: a strategy comes twice"),
        ("evaluate.num_samples=1", "evaluate.num_samples: Input should be greater than or equal to 2, got 1"),
        ("data.channels=2", "data.channels: Input should be 1 or 3, got 2"),
        ("data.class_names=[a, a]", "data: class_names: a name comes twice"),
    ],
)
def test_what_only_a_later_stage_would_stumble_over_is_refused_at_the_start(setting: str, message: str) -> None:
    """A run never changes: a strategy that doesn't exist must not be found after all training."""
    with pytest.raises(ConfigError) as refused:
        load_recipe("tiny", (setting,))
    assert str(refused.value) == f"recipe tiny with {setting}: {message}"
