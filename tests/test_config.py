"""Recipes load, settings apply, and every mistake is one line that names the field and what to do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.config import RunConfig, load_recipe, parse_config, recipe_names
from ddm_ray.config.fields import field_groups
from ddm_ray.errors import ConfigError
from ddm_ray.spelling import escape_unprintable


def refusal(*changes: str, recipe: str = "tiny") -> str:
    """The one line that a recipe with these settings is refused with."""
    with pytest.raises(ConfigError) as failure:
        load_recipe(recipe, changes)
    message = str(failure.value)
    assert message.isprintable(), "more than one line"
    return message


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_loads_and_survives_json(name: str) -> None:
    config = load_recipe(name)
    assert config.name == name
    assert config.monolith.train.batch == config.expert.train.batch * config.partition.num_clusters
    assert parse_config(json.loads(json.dumps(config.model_dump(mode="json"))), "here") == config


def test_a_batch_by_its_older_name_is_that_of_all_experts() -> None:
    older = load_recipe("tiny", ("expert.train.global_batch=12", "router.train.global_batch=12"))
    assert older == load_recipe("tiny", ("expert.train.batch=6", "router.train.batch=12"))


def test_an_expert_may_differ_from_the_others() -> None:
    changes = "experts={0: {model: {width: 16}, train: {batch: 4}}, 1: {flow: {prediction: noise}}}"
    config = load_recipe("tiny", (changes, "expert.model.analytic_skip="))
    assert parse_config(json.loads(json.dumps(config.model_dump(mode="json"))), "here") == config
    assert (config.expert_of(0).model.width, config.expert_of(1).model.width) == (16, 32)
    assert (config.flow_of(0).prediction, config.flow_of(1).prediction) == ("velocity", "noise")
    assert config.monolith.train.batch == 4 + 16
    named = load_recipe("images64", ("experts={5: {model: {size: Ti}}}",)).expert_of(5).model
    assert (named.width, named.depth, named.patch_size) == (192, 12, load_recipe("images64").expert.model.patch_size)


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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["expert.train.stesp=5"], "expert.train.stesp: unknown key"),
        (["expert.train.steps=many"], "expert.train.steps: Input should be a valid integer"),
        (["expert.train.steps=0"], "expert.train.steps: Input should be greater than 0, got 0"),
        (
            ["expert.train.warmup_steps=99999"],
            "warmup_steps 99999 is more than steps 300, so that the learning rate",
        ),
        (["expert.train=5"], "expert.train: Input should be a valid dictionary"),
        (["name=''"], "name: String should have at least 1 character"),
        (["data.class_names=[]"], "data: conditions are either classes (class_names or num_classes) or text"),
        (
            ["partition.method=label", "partition.num_clusters=16"],
            "partition.method label makes 16 clusters of classes, and data has 10 classes: lower",
        ),
        (["data.num_classes=9", "data.class_names=[a, b]"], "data: num_classes is 9, but 2 class_names are given"),
        (["data.latents={autoencoder: vae}"], "data.latents.scale: Field required"),
        (
            ["data.text={encoder: a, tokens: 1, dim: 1, pooled_encoder: b}"],
            "data.text: pooled_encoder needs pooled_dim",
        ),
        (["expert.train.learning_rate=.inf"], "expert.train.learning_rate: Input should be a finite number"),
        (["expert.train.betas=[0.9, 1.0]"], "expert.train.betas.1: Input should be less than 1"),
        (["flow.path=cosine"], "expert.model.analytic_skip is for the velocity of the linear path: leave it out"),
        (
            ["expert.train.global_batch=33"],
            "expert.train.global_batch (33) can't be shared by 2 experts: set expert.train.batch",
        ),
        (["experts={2: {}}"], "experts.2: there is no such cluster: they are 0 to 1"),
        (["experts={1: {model: {width: -1}}}"], "experts.1.model.width: Input should be greater"),
        (["experts.x.train.steps=3"], "experts.x: is no cluster's number"),
        (["experts={1: {flow: {path: cosine}}}"], "experts.1.model.analytic_skip is for the velocity of the linear"),
        (
            ["expert.train.init_from={source: x, network: monolith}", "experts={1: {model: {width: 16}}}"],
            "experts.1: another network than expert.model can't begin with expert.train.init_from",
        ),
        (["partition.numbers=[3, 1]"], "partition: numbers: must ascend"),
        (["partition.numbers=[3]"], "partition: numbers: are 1, and num_clusters is 2"),
        (["partition.num_clusters=1025"], "partition.num_clusters: Input should be less than or equal to 1024"),
        (["partition.num_fine=1"], "partition: num_fine (1) must be at least num_clusters (2)"),
        (["expert.model.heads=3"], "expert.model: width (32) must be a multiple of heads (3) and of 4"),
        (["expert.model.patch_size=3"], "expert.model.patch_size (3) must divide data.image_size (8)"),
        (["expert.model=5"], "expert.model: Input should be a valid dictionary or instance of DenoiserConfig, got 5"),
        (["expert.model={size: XXL}"], "expert.model: size: 'XXL' is not one of Ti, S, B, L, XL"),
        (["router.model={size: Ti, heads: 4}"], "router.model: size (Ti) already says heads: give one or the other"),
        (["expert.model={arguments: {}}"], "expert.model.name: Field required"),
        (
            ["expert.model={name: FluxTransformer2DModel}"],
            "expert.model: FluxTransformer2DModel is conditioned on text",
        ),
        (["expert.model={name: FluxTransformer2DModel, width: 3}"], "expert.model.width: unknown key"),
        (
            ["data.latents={autoencoder: none, scale: 1}", "data.crop_margin=4"],
            "data: crop_margin is 4: latents are of one crop, the middle; leave it out",
        ),
        (["embedder.dim=65"], "embedder.dim is 65, and an image has 64 values: set it to 64 or less"),
        (["a=1", "b=2", "sample.steps=x"], "a: unknown key; b: unknown key"),
        (['"a\\nb"=1'], "unknown key"),
    ],
)
def test_what_does_not_fit_is_named(changes: list[str], expected: str) -> None:
    message = refusal(*changes)
    assert message.startswith(f"recipe tiny with {' '.join(changes)}: ")
    assert expected in message


@pytest.mark.parametrize("setting", ["", "=5", "expert.train.steps", "expert..steps=5"])
def test_a_setting_of_another_form_is_shown_the_form(setting: str) -> None:
    message = refusal(setting)
    assert message == f"setting {setting!r}: write it as a.b=value, e.g. expert.train.steps=500"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("name.first=x", "'name' has no fields below it"),
        ("expert=[1, 2", "not YAML"),
        ("expert=!!python/object:os.system x", "not YAML: line 1, column 1: could not determine a constructor"),
    ],
)
def test_a_setting_that_cannot_be_applied(setting: str, expected: str) -> None:
    message = refusal(setting)
    assert message.startswith(f"setting {setting!r}: ")
    assert expected in message


@settings(deadline=None)
@given(st.text(max_size=30), st.sampled_from(["name", "expert.train.steps", "embedder.model_args", "x", ""]))
def test_any_setting_applies_or_is_refused_in_one_line(text: str, field: str) -> None:
    for setting in (text, f"{field}={text}", f"{text}={field}"):
        try:
            load_recipe("tiny", (setting,))
            outcome = "applied"
        except ConfigError as error:
            outcome = str(error)
        assert len(outcome.splitlines()) == 1


@pytest.mark.parametrize(("recipe", "near"), [("", ""), ("image64", "images64"), ("TINY", "tiny")])
def test_an_unknown_recipe_lists_the_shipped_ones(recipe: str, near: str) -> None:
    message, known = refusal(recipe=recipe), ", ".join(recipe_names())
    guess = f"; did you mean {near}?" if near else ""
    assert message == f"recipe {recipe!r} is neither a shipped one ({known}) nor a .yaml file{guess}"


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("expert.train.stepz=3", "expert.train.steps"),
        ("date.source=photos", "data"),
        ("num_clusters=4", "partition.num_clusters"),
        ("expert.model.widht=8", "expert.model.width of a DiT"),
        ("expert.model={name: FluxTransformer2DModel, hads: 2}", "expert.model.heads of a DiT"),
        ("steps=5", "sample.steps"),
        ("embedder.kind=pixel", "pixels"),
        ("experts.0.train.lerning_rate=1", "train.learning_rate"),
        ("experts.0.model.widht=32", "model.width of a DiT"),
        ("experts.0.flow.prediction=nose", "noise"),
    ],
)
def test_a_mistyped_field_or_choice_is_guessed(setting: str, meant: str) -> None:
    guess = refusal(setting).partition("; did you mean ")[2]
    assert meant in guess.rstrip("?").split(" or ")


@pytest.mark.parametrize("setting", ["zebra=1", "expert.train.zebra=1", "partition.method=zebra"])
def test_a_word_that_is_near_nothing_is_not_guessed(setting: str) -> None:
    assert "did you mean" not in refusal(setting)


def test_every_field_is_on_the_page_with_values_default_and_advice() -> None:
    config, shown = load_recipe("laion256-k8"), set[str]()
    for group in field_groups(RunConfig):
        for field in group.fields:
            assert field.values and field.default and field.about, (group.paths, field)
            shown |= {f"{path}.{field.name}".removeprefix(".") for path in group.paths}
    assert set(dotted(config.model_dump(exclude_none=True), "")) <= shown
    assert {"data.source", "expert.train.steps", "evaluate.features.kind", "student.model.width"} <= shown
    (train,) = [group for group in field_groups(RunConfig) if "router.train" in group.paths]
    by_name = {field.name: field for field in train.fields}
    assert (by_name["steps"].values, by_name["steps"].default) == ("whole number above 0", "required")
    assert (by_name["ema_decay"].values, by_name["ema_decay"].default) == ("number, at least 0, below 1", "`0.9999`")
    assert by_name["precision"].values == "`fp32`, `bf16`"


def dotted(fields: dict[str, Any], above: str) -> Iterator[str]:
    """Dotted paths of all fields, those of parts included."""
    for name, value in fields.items():
        yield f"{above}{name}"
        if isinstance(value, dict) and name not in ("arguments", "model_args"):
            yield from dotted(value, f"{above}{name}.")


def test_a_recipe_file_that_is_missing() -> None:
    assert refusal(recipe="missing.yaml") == "recipe missing.yaml: no such file"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"name: [1", "not YAML: line 1, column 9: expected ',' or ']', but got '<stream end>'"),
        (b"name: a\n\tb: c\n", "not YAML: line 2, column 1: found character '\\t' that cannot start any token"),
        (b"", "holds no fields"),
        (b"name: mine\n", "data: Field required; partition: Field required; expert: Field required"),
    ],
)
def test_a_broken_recipe_file_is_named(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    message = refusal(recipe=str(path))
    assert message.startswith(f"recipe {path}")
    assert expected in message


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
        ("sample.strategy=top-3", "sample.strategy: unknown strategy 'top-3' for 2 experts: use once, full, oracle"),
        ("sample.strategy=oracle", "sample.strategy: 'oracle' needs clusters that are known beforehand: use once"),
        ("evaluate.strategies=[monolith]", "evaluate.strategies: unknown strategy 'monolith' for 2 experts: use once"),
        ("data.source=/photos/caf\udce9", r"data.source: is not UTF-8; rename it, got '/photos/caf\udce9'"),
        ("data.class_names=[a, a]", "data: class_names: a name comes twice"),
        ("data.class_names=[café, cafe\u0301]", "data: class_names: a name comes twice: café"),
        ("data.class_names=[a, 'a ']", "data: class_names: a name comes twice: a"),
        ("evaluate.strategies=[full, full]", "evaluate.strategies: a strategy comes twice"),
        (
            "data.channels=2",
            "data: channels is 2: pixels have 1 or 3, others are for latents (data.latents)",
        ),
    ],
)
def test_what_only_a_later_stage_would_stumble_over_is_refused_at_the_start(setting: str, message: str) -> None:
    """A run never changes: a strategy that doesn't exist must not be found after all training."""
    with pytest.raises(ConfigError) as refused:
        load_recipe("tiny", (setting,))
    assert str(refused.value).startswith(escape_unprintable(f"recipe tiny with {setting}: {message}"))


def test_a_setting_of_conditions_replaces_the_recipes() -> None:
    assert load_recipe("images64", ("data.class_names=[crow, owl]",)).data.num_classes == 2
    assert load_recipe("digits", ("data.num_classes=3",)).data.class_names == ("0", "1", "2")
    assert load_recipe("laion256-k8", ("data.num_classes=3",)).data.text is None
    assert load_recipe("images64", ("embedder.kind=pixels",)).embedder.model_dump(exclude_defaults=True) == {
        "batch_size": 64
    }
    own = load_recipe("images64", ("embedder.kind=timm", "embedder.image_size=98")).embedder
    assert (own.kind, own.image_size) == ("timm", 98)
    both = load_recipe("digits", ("data.class_names=[a, b]", "data.num_classes=2"))
    assert both.data.class_names == ("a", "b")
