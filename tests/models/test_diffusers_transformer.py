"""The adapter gives what diffusers' own modules give when called by hand: real ones, of random weights."""

import sys
from typing import Any

import diffusers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddm_ray.core.condition import Text
from ddm_ray.errors import ConfigError, CorruptArtifact, SamplingError
from ddm_ray.models import weights
from ddm_ray.models.diffusers_transformer import NAMES, DiffusersTransformer, grid_ids, pack_squares, unpack_squares

SD3, FLUX, PIXART = "SD3Transformer2DModel", "FluxTransformer2DModel", "PixArtTransformer2DModel"
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
ARGUMENTS: dict[str, dict[str, Any]] = {
    SD3: {
        **HEADS,
        **{"sample_size": 8, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8},
        **{"joint_attention_dim": 12, "pooled_projection_dim": 10, "caption_projection_dim": 32},
    },
    FLUX: {
        **HEADS,
        **{"num_single_layers": 2, "in_channels": 16, "axes_dims_rope": [4, 6, 6]},
        **{"joint_attention_dim": 12, "pooled_projection_dim": 10},
    },
    PIXART: {
        **HEADS,
        **{"sample_size": 8, "in_channels": 4, "out_channels": 8},
        **{"caption_channels": 12, "cross_attention_dim": 32},
    },
}


def network(name: str, **changes: Any) -> DiffusersTransformer:
    """A small one whose every parameter is random, so that no zero gate hides anything."""
    torch.manual_seed(0)
    model = DiffusersTransformer(name, {**ARGUMENTS[name], **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def rows(num_rows: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Text]:
    draw = torch.Generator().manual_seed(1)
    mask_BL = torch.arange(7) < torch.tensor([7, 4, 1])[:num_rows, None]
    text = Text(
        torch.randn(num_rows, 7, 12, generator=draw, dtype=dtype),
        mask_BL,
        torch.randn(num_rows, 10, generator=draw, dtype=dtype),
    )
    x_BCHW = torch.randn(num_rows, 4, 8, 8, generator=draw, dtype=dtype)
    return x_BCHW, torch.tensor([0.0, 0.37, 1.0])[:num_rows], text


def test_sd3_as_called_by_hand() -> None:
    model, (x_BCHW, t_B, text) = network(SD3), rows()
    by_hand = model.transformer(
        x_BCHW, text.tokens_BLE, text.pooled_BP, torch.tensor([0.0, 370.0, 1000.0]), return_dict=False
    )[0]
    torch.testing.assert_close(model(x_BCHW, t_B, text), by_hand)


@pytest.mark.parametrize("guidance_embeds", [False, True])
def test_flux_as_called_by_hand(guidance_embeds: bool) -> None:
    model, (x_BCHW, t_B, text) = network(FLUX, guidance_embeds=guidance_embeds), rows()
    pipeline = diffusers.FluxPipeline
    ids_N3 = pipeline._prepare_latent_image_ids(3, 4, 4, torch.device("cpu"), torch.float32)
    packed_BNE = model.transformer(
        pipeline._pack_latents(x_BCHW, 3, 4, 8, 8),
        text.tokens_BLE,
        text.pooled_BP,
        t_B,
        img_ids=ids_N3,
        txt_ids=torch.zeros(7, 3),
        guidance=torch.ones(3) if guidance_embeds else None,
        return_dict=False,
    )[0]
    by_hand = pipeline._unpack_latents(packed_BNE, 8, 8, 1)
    assert by_hand.shape == x_BCHW.shape
    torch.testing.assert_close(model(x_BCHW, t_B, text), by_hand)


@pytest.mark.parametrize("out_channels", [4, 8])
@pytest.mark.parametrize("told_sizes", [False, True])
def test_pixart_as_called_by_hand(told_sizes: bool, out_channels: int) -> None:
    changes = {"num_attention_heads": 3, "cross_attention_dim": 48, "out_channels": out_channels}
    model, (x_BCHW, t_B, text) = network(PIXART, use_additional_conditions=told_sizes, **changes), rows()
    size = {"resolution": torch.full((3, 2), 64.0), "aspect_ratio": torch.ones(3, 1)}
    by_hand = model.transformer(
        x_BCHW,
        encoder_hidden_states=text.tokens_BLE,
        timestep=torch.tensor([0.0, 369.0, 999.0]),
        added_cond_kwargs=size if told_sizes else {"resolution": None, "aspect_ratio": None},
        encoder_attention_mask=text.mask_BL.float(),
        return_dict=False,
    )[0]
    assert by_hand.shape[1] == out_channels
    torch.testing.assert_close(model(x_BCHW, t_B, text), by_hand[:, :4])


def test_pixart_alone_masks_its_text() -> None:
    """SD3 and FLUX were published with padding attended to; in PixArt it must not matter."""
    x_BCHW, t_B, text = rows()
    noise_BLE = torch.where(text.mask_BL[..., None], text.tokens_BLE, text.tokens_BLE + 1)
    other = Text(noise_BLE, text.mask_BL, text.pooled_BP)
    for name in NAMES:
        model = network(name)
        change_B = (model(x_BCHW, t_B, text) - model(x_BCHW, t_B, other)).abs().amax((1, 2, 3))
        assert change_B[0] == 0
        assert (change_B[1:] > 1e-4).tolist() == [name != PIXART] * 2


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_packing_and_back_is_nothing(num_rows: int, rows_of: int, columns: int, channels: int) -> None:
    x_BCHW = torch.randn(num_rows, channels, 2 * rows_of, 2 * columns)
    tokens_BNE = pack_squares(x_BCHW)
    assert tokens_BNE.shape == (num_rows, rows_of * columns, 4 * channels)
    assert torch.equal(unpack_squares(tokens_BNE, 2 * rows_of, 2 * columns), x_BCHW)
    ids_N3 = grid_ids(rows_of, columns, torch.device("cpu")).long()
    last = tokens_BNE.shape[1] - 1
    row, column = ids_N3[last, 1:].tolist()
    square_BC22 = x_BCHW[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
    assert torch.equal(tokens_BNE[:, last], square_BC22.flatten(1))


@pytest.mark.parametrize("name", NAMES)
def test_bf16_stays_near(name: str) -> None:
    model, (x_BCHW, t_B, text) = network(name), rows(2)
    exact = model(x_BCHW, t_B, text)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()  # buffers stay in fp32, as DeepSpeed and loaders leave them
    low = model(x_BCHW, t_B, text)
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).square().mean().sqrt() < 0.05 * exact.square().mean().sqrt()


@pytest.mark.parametrize("name", NAMES)
def test_the_wrong_condition_is_refused(name: str) -> None:
    model, (x_BCHW, t_B, text) = network(name), rows()
    with pytest.raises(SamplingError, match=f"^{name} is conditioned on text, the request gives class labels$"):
        model(x_BCHW, t_B, torch.zeros(3, dtype=torch.int64))
    bare = Text(text.tokens_BLE, text.mask_BL)
    if name == PIXART:
        assert torch.equal(model(x_BCHW, t_B, bare), model(x_BCHW, t_B, text))
    else:
        with pytest.raises(SamplingError, match=f"^{name} needs a pooled vector"):
            model(x_BCHW, t_B, bare)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("UNet2DModel", {}, "no adapter for diffusers' 'UNet2DModel': use one of Flux"),
        (SD3, {"depth": 3}, f"{SD3} can't be built from its arguments: .*depth"),
        (PIXART, {"norm_type": "batch"}, f"{PIXART} can't be built from its arguments: .*norm_type"),
        (PIXART, {"patch_size": 0}, f"{PIXART} can't be built from its arguments: .*zero"),
    ],
)
def test_what_builds_nothing_is_told(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as failure:
        DiffusersTransformer(name, arguments)
    assert "\n" not in str(failure.value)
    with pytest.raises(CorruptArtifact, match="config of DiffusersTransformer doesn't build one"):
        weights.build({"class": "DiffusersTransformer", "config": {"name": name, "arguments": arguments}})


def test_without_diffusers_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match=rf"^{SD3} needs diffusers: install it with: pip install 'ddm-ray\[diffusers"):
        DiffusersTransformer(SD3, {})
