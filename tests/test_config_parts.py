"""The parts of a configuration: sizes of networks, classes and texts, diffusers' transformers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddm_ray.config import (
    SIZES,
    DataConfig,
    DenoiserConfig,
    DiffusersConfig,
    ModelConfig,
    load_recipe,
    recipe_names,
)
from ddm_ray.data.sources import open_source
from ddm_ray.errors import ConfigError, DataError
from ddm_ray.run.graph import ROWS
from ddm_ray.run.run import Run

AUGMENTATION = {"fit": "pad", "horizontal_flips": "true", "crop_margin": "2"}


@pytest.mark.parametrize("size", SIZES)
def test_a_size_stands_for_width_depth_and_heads(size: str) -> None:
    short, (width, depth, heads) = ModelConfig.model_validate({"size": size, "patch_size": 4}), SIZES[size]
    assert short == ModelConfig(width=width, depth=depth, heads=heads, patch_size=4)
    assert ModelConfig.model_validate(short.model_dump()) == short
    assert short.model_dump().keys() == {"patch_size", "width", "depth", "heads", "mlp_ratio", "adaln"}
    recipe_model = load_recipe("tiny", (f"expert.model={{size: {size}}}",)).expert.model
    assert recipe_model.model_dump() == {**short.model_dump(), "patch_size": 2, "analytic_skip": None}


@pytest.mark.parametrize(("size", "patch_size"), [("S", 2), ("B", 4), ("L", 8), ("XL", 2)])
def test_a_dits_name_says_its_patches_too(size: str, patch_size: int) -> None:
    as_ever = DenoiserConfig.model_validate({"size": size, "patch_size": patch_size, "adaln": "single"})
    for name in (f"DiT-{size}/{patch_size}", f"dit-{size.lower()}/{patch_size}", f"DIT-{size}/{patch_size}"):
        assert DenoiserConfig.model_validate({"size": name, "adaln": "single"}) == as_ever
    config = load_recipe("laion256-k8", (f"router.model={{size: dit-{size}/{patch_size}}}",))
    assert config.router.model == ModelConfig.model_validate({"size": size, "patch_size": patch_size})


@pytest.mark.parametrize("size", ["dit-s", "dit-s/3", "DiT-XL/22", " dit-s/2", "s", ""])
def test_what_is_no_size_is_told(size: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^recipe tiny .*: expert\.model: size: .* DiT-XL/2 \(S, B, L, XL; 2, 4, 8\)$"
    ):
        load_recipe("tiny", (f"expert.model={{size: {json.dumps(size)}}}",))


def test_classes_are_counted_or_named() -> None:
    named = DataConfig(class_names=("cat", "dog"))
    assert named.num_classes == 2
    counted = DataConfig(num_classes=1000)
    assert (counted.class_names[0], counted.class_names[999], len(counted.class_names)) == ("0", "999", 1000)
    for data in (named, counted):
        assert DataConfig.model_validate(data.model_dump(mode="json")) == data


def test_folders_of_networks_may_lie_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    fields = ("text.encoder", "text.pooled_encoder", "latents.autoencoder")
    names = (*(f"data.{field}" for field in fields), "embedder.model", "embedder.checkpoint", "evaluate.clip")
    config = load_recipe("laion256-k8", ("data.text.pooled_dim=8", *(f"{name}=~/{name}" for name in names)))
    stored = config.model_dump_json()
    assert [name for name in names if f'"/home/ada/{name}"' not in stored] == []


def test_the_expert_may_be_a_transformer_of_diffusers() -> None:
    config = load_recipe("ddm-24b")
    assert isinstance(config.expert.model, DiffusersConfig)
    assert config.expert.model.arguments_for(config.data)["arguments"] == config.expert.model.arguments | {
        "in_channels": 16,
        "joint_attention_dim": 2048,
        "pooled_projection_dim": 768,
    }
    assert isinstance(load_recipe("laion256-k8").expert.model, DenoiserConfig)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("expert.model.arguments.in_channels=4", "expert.model.arguments.in_channels: follows from data, leave it out"),
        (
            "data.text={encoder: t5, tokens: 8, dim: 4}",
            "expert.model: FluxTransformer2DModel is conditioned on a pooled",
        ),
        ("data.image_size=33", "expert.model.patch_size (2) must divide data.image_size (33)"),
        ("expert.model={name: PixArtTransformer2DModel, arguments: {patch_size: 5}}", "patch_size (5) must divide"),
    ],
)
def test_what_does_not_fit_a_transformer_of_diffusers_is_told(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as failure:
        load_recipe("ddm-24b", (setting,))
    assert str(failure.value).startswith(f"recipe ddm-24b with {setting}: ")
    assert message in str(failure.value)


def test_a_source_that_is_not_there_is_told() -> None:
    with pytest.raises(DataError, match=r"^data\.source '.*/cifar': no such folder or file; give a folder, a URI \(s3"):
        open_source(load_recipe("tiny", ("data.source=cifar",)).data).list()


def test_guidance_without_dropped_conditions_is_refused() -> None:
    settings = ("expert.train.condition_dropout=0", "sample.guidance_scale=2")
    with pytest.raises(ConfigError, match=r"sample.guidance_scale \(2.0\) needs a null condition"):
        load_recipe("tiny", settings)
    assert load_recipe("tiny", settings[:1]).sample.guidance_scale == 1
    one = "experts={1: {train: {condition_dropout: 0}}}"
    taught = ("student.train={steps: 3, batch: 4, condition_dropout: 0}", "student.guidance_scale=1")
    with pytest.raises(ConfigError, match=r"train with experts\.1\.train.condition_dropout above 0"):
        load_recipe("tiny", (one, *settings[1:], *taught))
    assert not load_recipe("tiny", (one, *taught)).experts_know_null


def test_photographs_are_mirrored_and_letters_are_not() -> None:
    mirrored = {name for name in recipe_names() if load_recipe(name).data.horizontal_flips}
    assert mirrored == {"photos-cpu", "photos-gpu", "images64", "imagenet256-k8", "laion256-k8", "ddm-24b"}


def test_an_older_run_reads_as_rows_as_they_are(tmp_path: Path) -> None:
    """Its artifacts don't drift, though their identities say nothing of augmentation."""
    run = Run.create(str(tmp_path), load_recipe("tiny"))
    fields = run.identity(ROWS).fields
    older = {name: value for name, value in fields["data"].items() if name not in AUGMENTATION}
    assert len(older) == len(fields["data"]) - 3
    assert not run.drift(ROWS, replace(run.identity(ROWS), fields={**fields, "data": older}), run.identity(ROWS))
    for field, value in AUGMENTATION.items():
        other = Run.create(str(tmp_path / field), load_recipe("tiny", (f"data.{field}={value}",)))
        assert other.drift(ROWS, run.identity(ROWS), other.identity(ROWS)), field
