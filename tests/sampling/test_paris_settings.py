"""What a checkpoint of Paris's layout says wrongly or not at all: fields, foreign components, the prior of classes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddm_ray.errors import (
    ConfigError,
    CorruptArtifact,
    DDMError,
    MissingArtifact,
    NullConditionError,
    SamplingError,
    TruncatedWeights,
)
from ddm_ray.models import weights
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.sampling.paris_weights import load_network
from tests.sampling import paris_reference as reference

EXPERT_FILE = "diffusion_pytorch_model.safetensors"
TEXT_FILE, VAE_FILE = "text_encoder/model.safetensors", "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.write(tmp_path_factory.mktemp("paris") / "checkpoint")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conditioned on five classes in place of texts."""
    return relabelled(reference.write(tmp_path_factory.mktemp("paris") / "labelled"), reference.LABELLED)


def relabelled(root: Path, config: dict[str, Any]) -> Path:
    for number in range(reference.NUM_EXPERTS):
        place = root / f"expert_{number}"
        (place / "config.json").write_text(json.dumps(config | {"expert_id": number}))
        save_file(reference.weights(config, number), place / EXPERT_FILE)
    return root


def field(file: str, **changes: Any) -> Callable[[Path], Any]:
    return lambda root: (root / file).write_text(json.dumps(json.loads((root / file).read_text()) | changes))


def text(file: str, content: str) -> Callable[[Path], Any]:
    return lambda root: (root / file).write_text(content)


def cut(file: str) -> Callable[[Path], Any]:
    return lambda root: (root / file).write_bytes((root / file).read_bytes()[:-50])


def tensors(file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def fault(root: Path) -> None:
        named_tensors = load_file(root / file)
        change(named_tensors)
        save_file(named_tensors, root / file, metadata={"format": "pt"})

    return fault


def first(named_tensors: dict[str, torch.Tensor], part: str) -> str:
    return next(name for name in named_tensors if part in name)


def empty_tokenizer(root: Path) -> None:
    for file in (root / "tokenizer").glob("*.json"):
        file.write_text("{}")


FAULTS: list[tuple[Callable[[Path], Any], type[DDMError], str]] = [
    (field("config.json", num_experts="3"), CorruptArtifact, r"config\.json: num_experts is '3', not a whole number"),
    (field("config.json", num_experts=0), CorruptArtifact, r"config\.json: num_experts is 0"),
    (field("config.json", image_size=8.0), CorruptArtifact, r"config\.json: image_size is 8\.0"),
    (field("expert_0/config.json", num_heads=0), CorruptArtifact, r"expert_0/config\.json: num_heads is 0"),
    (field("expert_0/config.json", patch_size=0), CorruptArtifact, r"expert_0/config\.json: patch_size is 0"),
    (field("expert_0/config.json", num_layers=True), CorruptArtifact, r"expert_0/config\.json: num_layers is True"),
    (
        field("expert_0/config.json", mlp_ratio="4"),
        CorruptArtifact,
        r"expert_0/config\.json: mlp_ratio is '4'",
    ),
    (field("router/config.json", num_clusters=None), CorruptArtifact, r"router/config\.json: num_clusters is None"),
    (empty_tokenizer, CorruptArtifact, r"tokenizer .*/tokenizer: can't be loaded \(KeyError"),
    (field("model_index.json", tokenizer=["transformers", "T5Tokenizer"]), CorruptArtifact, "tokenizer .* can't be"),
    (
        field("model_index.json", tokenizer=["transformers", 3]),
        CorruptArtifact,
        r"tokenizer is \['transformers', 3\]; of",
    ),
    (text("text_encoder/config.json", "[]"), CorruptArtifact, r"text_encoder/config\.json: not an object"),
    (text("text_encoder/config.json", "{"), CorruptArtifact, r"text_encoder/config\.json: not JSON"),
    (text("vae/config.json", "[]"), CorruptArtifact, r"vae/config\.json: not an object"),
    (lambda root: (root / "vae/config.json").unlink(), MissingArtifact, r"vae lacks config\.json"),
    (cut(TEXT_FILE), TruncatedWeights, rf"{TEXT_FILE}: not whole safetensors"),
    (cut(VAE_FILE), TruncatedWeights, rf"{VAE_FILE}: not whole safetensors"),
    (
        tensors(TEXT_FILE, lambda named_tensors: named_tensors.pop(first(named_tensors, "token_embedding"))),
        CorruptArtifact,
        r"text_encoder: lacks the tensor .*token_embedding\.weight",
    ),
    (
        tensors(
            TEXT_FILE,
            lambda named_tensors: named_tensors.update({first(named_tensors, "token_embedding"): torch.zeros(1, 12)}),
        ),
        CorruptArtifact,
        r"text_encoder: has another shape than its config says: tensor .*token_embedding\.weight",
    ),
    (
        tensors(TEXT_FILE, lambda named_tensors: named_tensors.update(stray=torch.zeros(1))),
        CorruptArtifact,
        "text_encoder: is no CLIPTextModel alone: has the tensor stray",
    ),
    (
        tensors(VAE_FILE, lambda named_tensors: named_tensors.pop("decoder.conv_in.weight")),
        CorruptArtifact,
        r"vae: lacks the tensor decoder\.conv_in\.weight",
    ),
    (
        tensors(VAE_FILE, lambda named_tensors: named_tensors.update({"decoder.conv_in.bias": torch.zeros(1)})),
        CorruptArtifact,
        r"vae: has another shape than its config says: tensor decoder\.conv_in\.bias",
    ),
    (
        tensors(VAE_FILE, lambda named_tensors: named_tensors.update(stray=torch.zeros(1))),
        CorruptArtifact,
        "vae: is no AutoencoderKL alone: has the tensor stray",
    ),
    (
        lambda root: (
            torch.save(load_file(root / VAE_FILE), (root / VAE_FILE).with_suffix(".bin")) or (root / VAE_FILE).unlink()
        ),
        CorruptArtifact,
        "vae: can't be loaded",
    ),
]


@pytest.mark.parametrize(("fault", "kind", "message"), FAULTS)
def test_what_is_wrong_is_said_in_one_line(
    checkpoint: Path, tmp_path: Path, fault: Callable[[Path], Any], kind: type[DDMError], message: str
) -> None:
    reference.check_refused(checkpoint, tmp_path, fault, kind, message)


def test_names_say_tensors(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="names: 'cls_token' is 3: give our name"):
        DDMPipeline.from_pretrained(checkpoint, names={"cls_token": 3})


@pytest.mark.parametrize("again", [False, True])
def test_once_asks_the_router_for_classes_whose_prior_nobody_knows(labelled: Path, tmp_path: Path, again: bool) -> None:
    pipeline = DDMPipeline.from_pretrained(labelled)
    if again:
        pipeline.save_pretrained(tmp_path / "saved")
        pipeline = DDMPipeline.from_pretrained(tmp_path / "saved")
    assert pipeline.models.info.prior_CK is None
    output = pipeline(
        class_labels=3, num_images_per_prompt=6, strategy="once", seeds=1, num_inference_steps=2, guidance_scale=1
    )
    assert output.num_router_rows == 6
    without = DDMPipeline(type(pipeline.models)(pipeline.models.info, pipeline.models.experts, None))
    with pytest.raises(SamplingError, match="'once' needs the router, which isn't there: use oracle"):
        without(class_labels=3, strategy="once", output_type="latent")


def test_classes_without_dropout_have_no_null_condition(labelled: Path, tmp_path: Path) -> None:
    root = relabelled(shutil.copytree(labelled, tmp_path / "checkpoint"), reference.LABELLED | {"cfg_dropout_prob": 0})
    pipeline = DDMPipeline.from_pretrained(root)
    assert pipeline(class_labels=3, num_inference_steps=2).images
    for labels in ([3, None], 3):
        with pytest.raises(NullConditionError):
            pipeline(class_labels=labels, guidance_scale=1 if labels != 3 else 2, batch_size=1)


def test_a_network_is_not_initialised_before_it_is_read(checkpoint: Path) -> None:
    """To initialise takes random numbers: none are drawn."""
    config = {"image_size": 8, "channels": 4, "patch_size": 2, "width": 16, "depth": 2, "heads": 2, "num_classes": None}
    spec = {"class": "DiT", "config": config | {"adaln": "single", "text_dim": reference.EXPERT["text_embed_dim"]}}
    before = torch.get_rng_state()
    load_network(checkpoint / "expert_0" / EXPERT_FILE, spec)
    assert torch.equal(torch.get_rng_state(), before)
    weights.build(spec)
    assert not torch.equal(torch.get_rng_state(), before)
