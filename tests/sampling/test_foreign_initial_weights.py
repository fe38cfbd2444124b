"""Beginnings out of transformers that diffusers saved."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from ddm_ray.config import InitFrom, RunConfig, load_recipe
from ddm_ray.errors import ConfigError
from ddm_ray.run.graph import expert
from ddm_ray.sampling.trained_networks import read_trained
from tests.sampling.tiny_components import TEXT_DIM, TOKENS

LATENTS = "data.latents={autoencoder: x, downsampling: 2, scale: 0.5}"
SD3 = {
    **{"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "pos_embed_max_size": 8},
    **{"caption_projection_dim": 32},
}
SHAPE = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 12, "pooled_projection_dim": 10}


def config_of(*settings: str, text: str = f"encoder: x, tokens: {TOKENS}, dim: {TEXT_DIM}") -> RunConfig:
    """A run of texts, of latents of four channels."""
    return load_recipe(
        "tiny",
        (
            f"data.text={{{text}}}",
            LATENTS,
            "data.image_size=8",
            "data.channels=4",
            "partition.num_clusters=3",
            "expert.train.batch=10",
            *settings,
        ),
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
