"""Transformers of the diffusers library as networks of ours: same times, same conditions, plain tensors.

Shapes: B rows, C channels, H x W pixels or latents, N image tokens, L text tokens, E and P channels of the text.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm_ray.core.condition import Condition, Text
from ddm_ray.errors import ConfigError, SamplingError
from ddm_ray.models.network import Network
from ddm_ray.spelling import one_line

NAMES = ("FluxTransformer2DModel", "PixArtTransformer2DModel", "SD3Transformer2DModel")
TIMESTEPS = 1000
PACKING = 2  # FLUX sees squares of 2 x 2 latents as one token
GUIDANCE = 1.0  # for FLUX models distilled with guidance: none
PIXELS_PER_LATENT = 8  # PixArt takes the size of the image, not of its latents


class DiffusersTransformer(Network):
    """(x_BCHW, t_B in [0, 1], Text) -> what the network predicts, (B, C, H, W), on its own path.

    `name` is a class of diffusers, `arguments` its constructor's. Of a PixArt that predicts a variance too, the
    first C channels. SD3 and FLUX attend to all text tokens, masked or not, as published; FLUX rounds t to its
    activations' precision. ConfigError for names and arguments that build nothing, or without diffusers;
    SamplingError for conditions without text, or without the pooled vectors that SD3 and FLUX need.
    """

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.config = {"name": name, "arguments": dict(arguments)}
        self.name = name
        if name not in NAMES:
            raise ConfigError(f"no adapter for diffusers' {name!r}: use one of {', '.join(NAMES)}")
        try:
            import diffusers
        except ImportError:
            raise ConfigError(f"{name} needs diffusers: install it with: pip install 'ddm-ray[diffusers]'") from None
        try:
            self.transformer: nn.Module = getattr(diffusers, name)(**arguments)
        except (TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:  # what their constructors raise
            raise ConfigError(f"{name} can't be built from its arguments: {one_line(error, 200)}") from error
        built: Any = self.transformer.config
        self.text_dim = built.get("joint_attention_dim", built.get("caption_channels"))
        self.pooled_dim = built.get("pooled_projection_dim")

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition) -> Tensor:
        if not isinstance(condition, Text):
            raise SamplingError(f"{self.name} is conditioned on text, the request gives class labels")
        x_BCHW = x_BCHW.to(next(self.transformer.parameters()).dtype)
        tokens_BLE = condition.tokens_BLE.to(x_BCHW.dtype)
        # Never rounded to bf16 on the way: its 8 bits would make 1000 t jump in steps of 4.
        t_B = t_B if t_B.dtype == torch.float64 else t_B.float()
        if self.name == "PixArtTransformer2DModel":
            return self._pixart(x_BCHW, t_B, tokens_BLE, condition.mask_BL)
        if condition.pooled_BP is None:
            raise SamplingError(f"{self.name} needs a pooled vector beside each text's tokens, and the texts have none")
        call = self._flux if self.name == "FluxTransformer2DModel" else self._sd3
        return call(x_BCHW, t_B, tokens_BLE, condition.pooled_BP.to(x_BCHW.dtype))

    def _sd3(self, x_BCHW: Tensor, t_B: Tensor, tokens_BLE: Tensor, pooled_BP: Tensor) -> Tensor:
        return self.transformer(
            hidden_states=x_BCHW,
            timestep=TIMESTEPS * t_B,
            encoder_hidden_states=tokens_BLE,
            pooled_projections=pooled_BP,
            return_dict=False,
        )[0]

    def _flux(self, x_BCHW: Tensor, t_B: Tensor, tokens_BLE: Tensor, pooled_BP: Tensor) -> Tensor:
        num_rows, _, height, width = x_BCHW.shape
        guided = self.transformer.config.guidance_embeds  # type: ignore[union-attr]
        output_BNE = self.transformer(
            hidden_states=pack_squares(x_BCHW),
            timestep=t_B,
            encoder_hidden_states=tokens_BLE,
            pooled_projections=pooled_BP,
            img_ids=grid_ids(height // PACKING, width // PACKING, x_BCHW.device),
            txt_ids=torch.zeros(tokens_BLE.shape[1], 3, device=x_BCHW.device),
            guidance=t_B.new_full((num_rows,), GUIDANCE) if guided else None,
            return_dict=False,
        )[0]
        return unpack_squares(output_BNE, height, width)

    def _pixart(self, x_BCHW: Tensor, t_B: Tensor, tokens_BLE: Tensor, mask_BL: Tensor) -> Tensor:
        num_rows, channels, height, width = x_BCHW.shape
        size: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
        if self.transformer.use_additional_conditions:
            # Filled in on the device, so that nothing waits.
            sides_B = [
                t_B.new_full((num_rows,), PIXELS_PER_LATENT * side, dtype=torch.float32) for side in (height, width)
            ]
            resolution_B2 = torch.stack(sides_B, dim=1)
            size = {"resolution": resolution_B2, "aspect_ratio": resolution_B2[:, :1] / resolution_B2[:, 1:]}
        output = self.transformer(
            hidden_states=x_BCHW,
            # DDPM's step n = 1000 t counts from 1, and its index from 0.
            timestep=(TIMESTEPS * t_B - 1).clamp(min=0),
            encoder_hidden_states=tokens_BLE,
            encoder_attention_mask=mask_BL,
            added_cond_kwargs=size,
            return_dict=False,
        )[0]
        return output[:, :channels]


def pack_squares(x_BCHW: Tensor) -> Tensor:
    """Squares of 2 x 2 as tokens, row by row: (B, H/2 * W/2, 4 C), channel-major within a token."""
    return F.pixel_unshuffle(x_BCHW, PACKING).flatten(2).transpose(1, 2)


def unpack_squares(tokens_BNE: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack_squares`: (B, C, height, width)."""
    squares = tokens_BNE.transpose(1, 2).unflatten(2, (height // PACKING, width // PACKING))
    return F.pixel_shuffle(squares, PACKING)


def grid_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """FLUX's positions of image tokens, float32 (rows * columns, 3): 0, row, column."""
    row_N = torch.arange(rows, device=device).repeat_interleave(columns)
    column_N = torch.arange(columns, device=device).repeat(rows)
    return torch.stack([torch.zeros_like(row_N), row_N, column_N], dim=1).float()
