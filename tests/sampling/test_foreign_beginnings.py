"""Beginnings out of other people's files: Paris's layout, diffusers' transformers, DiT's own tensors."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ddm_ray.config import InitFrom, RunConfig, load_recipe
from ddm_ray.errors import ConfigError, CorruptArtifact, MissingArtifact
from ddm_ray.pipeline import DDMPipeline
from ddm_ray.sampling.components import bare
from ddm_ray.sampling.paris_weights import load_network
from ddm_ray.sampling.trained_networks import read_trained
from ddm_ray.storage.graph import ROUTER, expert
from tests.sampling import paris_reference as reference
from tests.sampling.tiny_components import TEXT_DIM, TOKENS

SIZES = {"width": "hidden_size", "depth": "num_layers", "heads": "num_heads", "patch_size": "patch_size"}
LATENTS = "data.latents={autoencoder: x, downsampling: 2, scale: 0.5}"
SD3 = {
    **{"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "pos_embed_max_size": 8},
    **{"caption_projection_dim": 32},
}
SHAPE = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 12, "pooled_projection_dim": 10}


def config_of(*settings: str, text: str = f"encoder: x, tokens: {TOKENS}, dim: {TEXT_DIM}") -> RunConfig:
    """A run of texts, of images as Paris's checkpoint has them."""
    return load_recipe(
        "tiny",
        (
            f"data.text={{{text}}}",
            LATENTS,
            f"data.image_size={reference.SIZE}",
            f"data.channels={reference.CHANNELS}",
            "partition.num_clusters=3",
            "expert.train.global_batch=30",
            *settings,
        ),
    )


def like(theirs: dict[str, Any]) -> dict[str, Any]:
    return {ours: theirs[name] for ours, name in SIZES.items()}


def same(a: nn.Module, b: nn.Module) -> bool:
    theirs = b.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in a.state_dict().items())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.write(tmp_path_factory.mktemp("paris") / "checkpoint")


def test_an_expert_and_the_router_in_paris_layout(checkpoint: Path) -> None:
    expert_model = json.dumps({**like(reference.EXPERT), "adaln": "single"})
    router_model = json.dumps(like(reference.ROUTER))
    config = config_of(f"expert.model={expert_model}", f"router.model={router_model}")
    models = DDMPipeline.from_pretrained(checkpoint).models
    read = read_trained(config, expert(0), InitFrom(source=str(checkpoint), network="expert 2"))
    assert same(read, bare(models.experts[2]))
    with pytest.raises(ConfigError, match=r"^router\.train\.init_from: .* has data\.text\.dim null, and this run"):
        read_trained(config, ROUTER, InitFrom(source=str(checkpoint)))  # theirs sees no text
    shallow = config_of(f"expert.model={json.dumps({**like(reference.EXPERT), 'adaln': 'single', 'depth': 1})}")
    with pytest.raises(ConfigError, match=r"expert\.model\.depth 2, and this run 1"):
        read_trained(shallow, expert(0), InitFrom(source=str(checkpoint), network="own"))
    with pytest.raises(MissingArtifact, match="expert_9"):
        read_trained(config, expert(0), InitFrom(source=str(checkpoint), network="expert 9"))


def test_tensors_under_the_names_of_dit(tmp_path: Path) -> None:
    file, theirs = tmp_path / "dit.safetensors", reference.LABELLED
    save_file(reference.weights(theirs, 3), file)
    config = load_recipe(
        "tiny",
        (
            f"expert.model={json.dumps(like(theirs))}",
            LATENTS,
            f"data.channels={reference.CHANNELS}",
            f"data.class_names={json.dumps([*'abcde'])}",
        ),
    )
    read = read_trained(config, expert(0), InitFrom(source=str(file)))
    shape = {"image_size": 8, "channels": 4, "num_classes": 5, "text_dim": None}
    assert same(read, load_network(file, {"class": "DiT", "config": {**like(theirs), **shape}}))
    with pytest.raises(CorruptArtifact, match=r"^expert\.train\.init_from: .*tensor .* has shape .*, expected"):
        read_trained(
            load_recipe("tiny", (f"expert.model={json.dumps(like(theirs))}", LATENTS, "data.channels=3")),
            expert(0),
            InitFrom(source=str(file)),
        )


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A pipeline's folder with a small SD3 of random weights, and its tensors."""
    folder = tmp_path_factory.mktemp("diffusers") / "pipeline"
    torch.manual_seed(1)
    network = diffusers.SD3Transformer2DModel(**SD3, **SHAPE)
    network.save_pretrained(folder / "transformer")
    return folder, network.state_dict()


@pytest.mark.parametrize("part", ["", "transformer"])
def test_a_transformer_of_diffusers(transformer: tuple[Path, dict[str, Tensor]], part: str) -> None:
    folder, tensors = transformer

    def read(name: str = "SD3Transformer2DModel", **changes: Any) -> nn.Module:
        model = json.dumps({"name": name, "arguments": {**(SD3 if name.startswith("SD3") else {}), **changes}})
        config = config_of(f"expert.model={model}", text="encoder: x, tokens: 4, dim: 12, pooled_dim: 10")
        return read_trained(config, expert(0), InitFrom(source=str(folder / part)))

    state = read().state_dict()
    assert all(torch.equal(state[f"transformer.{name}"], tensor) for name, tensor in tensors.items())
    with pytest.raises(ConfigError, match=r"expert\.model\.arguments\.num_layers 2, and this run 3"):
        read(num_layers=3)
    with pytest.raises(ConfigError, match=r"is a SD3Transformer2DModel.*set expert\.model\.name"):
        read("FluxTransformer2DModel")
