"""The contract of NETWORKS: every kind is configured, built, counted, checkpointed, saved and exported alike."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.config.networks import NETWORKS
from ddm_ray.core.condition import Text
from ddm_ray.models import weights
from ddm_ray.models.compiled import lists_of_blocks
from ddm_ray.models.flops import forward_flops_per_row, training_flops_per_row
from ddm_ray.models.network import Network, checkpoint_activations
from ddm_ray.models.rows import rows_of_zeros
from ddm_ray.models.spec import denoiser_spec
from ddm_ray.sampling.dense_export import TRANSFORMER
from ddm_ray.sampling.single_file import single_file

TOKENS, IMAGE = 4, (4, 8, 8)
SD3 = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "pos_embed_max_size": 8}
SMALL: dict[str, dict[str, Any]] = {
    "DiT": {"patch_size": 2, "width": 16, "depth": 2, "heads": 2},
    "DiffusersTransformer": {"name": "SD3Transformer2DModel", "arguments": SD3 | {"caption_projection_dim": 32}},
}


def config_of(kind: str, *settings: str) -> RunConfig:
    """A run of texts with a small network of this kind."""
    changes = [f"expert.model={json.dumps(SMALL[kind])}", "data.image_size=8", "data.channels=4"]
    changes.append(f"data.text={{encoder: x, tokens: {TOKENS}, dim: 12, pooled_dim: 10}}")
    return load_recipe("tiny", ("data.latents={autoencoder: vae, scale: 0.2}", *changes, *settings))


def network_of(kind: str) -> Network:
    torch.manual_seed(0)
    network = weights.build(denoiser_spec(config_of(kind)))
    assert isinstance(network, Network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return network


def predicted(network: nn.Module) -> Tensor:
    x_BCHW, t_B, condition = rows_of_zeros(network, 2, IMAGE, TOKENS)
    output: Tensor = network(torch.ones_like(x_BCHW), t_B + 0.5, condition)  # type: ignore[arg-type]
    return output


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_is_configured_by_its_own_fields(kind: str) -> None:
    model = config_of(kind).expert.model
    assert type(model) is NETWORKS[kind] and model.kind() == kind
    assert model.misfit(config_of(kind).flow, config_of(kind).data) == ""
    again = RunConfig.model_validate_json(config_of(kind).model_dump_json())
    assert again.expert.model == model


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_predicts_images_from_what_it_says_that_it_takes(kind: str) -> None:
    network = network_of(kind)
    assert predicted(network).shape == (2, *IMAGE) and network.text_dim == 12
    assert weights.spec_of_model(network) == denoiser_spec(config_of(kind))
    assert 0 < forward_flops_per_row(network, IMAGE, TOKENS) < training_flops_per_row(network, IMAGE, TOKENS)
    assert [len(blocks) for blocks in lists_of_blocks(network)] == [2]


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_is_saved_and_built_again_to_the_bit(kind: str) -> None:
    network = network_of(kind).eval()
    data, spec = weights.weights_as_bytes(network, weights.spec_of_model(network))
    again = weights.load_model(json.loads(spec), data)
    assert torch.equal(predicted(again), predicted(network))
    full = weights.complete_spec(json.loads(spec))
    assert (
        weights.complete_spec(full) == full
        and weights.build(full, "meta").state_dict().keys() == again.state_dict().keys()
    )


@pytest.mark.parametrize("kind", NETWORKS)
def test_checkpointed_activations_change_no_gradient(kind: str) -> None:
    gradients = []
    for on in (False, True):
        network = network_of(kind).train()
        checkpoint_activations(network, on)
        predicted(network).square().sum().backward()
        gradients.append([parameter.grad for parameter in network.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert plain is again is None or torch.equal(plain, again)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_leaves_out_tokens_if_it_says_so(kind: str) -> None:
    network = network_of(kind)
    if NETWORKS[kind].leaves_out_tokens:
        x_BCHW, t_B, condition, kept_BM = rows_of_zeros(network, 2, IMAGE, TOKENS, num_kept=3)
        assert network(x_BCHW, t_B, condition, kept_BM).shape == (2, *IMAGE)
        assert {"image_size", "patch_size"} <= network.config.keys()
    else:
        with pytest.raises(Exception, match="takes all tokens"):
            config_of(kind, "expert.train.mask_ratio=0.5", "expert.train.unmasked_steps=1")


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_is_exported_with_its_code(kind: str, tmp_path: Path) -> None:
    """One file with nothing of ours to import, of which the network is the same to the bit."""
    network = network_of(kind).eval()
    code = single_file(TRANSFORMER, type(network).__module__)
    assert "import ddm_ray" not in code and "from ddm_ray" not in code
    (tmp_path / f"exported_{kind}.py").write_text(code)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        exported = import_module(f"exported_{kind}").DenseTransformer(kind, network.config, {}, IMAGE).eval()
    exported.field.load_state_dict(network.state_dict())
    x_BCHW, t_B, text = rows_of_zeros(network, 2, IMAGE, TOKENS)
    assert isinstance(text, Text)
    given = {"encoder_hidden_states": text.tokens_BLE, "pooled_projections": text.pooled_BP}
    output = exported(torch.ones_like(x_BCHW), t_B + 0.5, **given).sample  # type: ignore[arg-type]
    assert torch.equal(output, predicted(network))
