"""The diffusion transformer (DiT: arXiv 2212.09748) with adaLN-zero, in plain torch.

Shapes: B rows, C channels, H and W of the image, N patches (tokens), D width, P values of a patch, h heads.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddm_ray.core.flow import along_batch, gaussian_velocity_slope
from ddm_ray.errors import ConfigError

TIME_FREQUENCIES = 128


class Attention(nn.Module):
    """Multi-head self-attention over tokens_BND."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        num_rows, num_tokens, width = tokens_BND.shape
        qkv = self.qkv(tokens_BND).view(num_rows, num_tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed_BhNd = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed_BhNd.transpose(1, 2).reshape(num_rows, num_tokens, width))


class Block(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the condition; the identity at initialisation."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, tokens_BND: Tensor, condition_BD: Tensor) -> Tensor:
        modulation = self.modulation(F.silu(condition_BD))[:, None].chunk(6, dim=2)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = modulation
        attended = self.attention(self.norm_attention(tokens_BND) * (1 + scale_a) + shift_a)
        tokens_BND = tokens_BND + gate_a * attended
        return tokens_BND + gate_m * self.mlp(self.norm_mlp(tokens_BND) * (1 + scale_m) + shift_m)


class Trunk(nn.Module):
    """Patches, time and label to tokens_BND, after the final modulated norm: what DiT and Router share.

    ConfigError for sizes that don't divide.
    """

    positions_1ND: Tensor

    def __init__(
        self,
        image_size: int,
        channels: int,
        num_classes: int,
        patch_size: int,
        width: int,
        depth: int,
        heads: int,
        mlp_ratio: float,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ConfigError(f"image_size {image_size} isn't a multiple of patch_size {patch_size}")
        if width % heads or width % 4:
            raise ConfigError(f"width {width} must be a multiple of 4 and of heads ({heads})")
        self.patch_size = patch_size
        self.patch_in = nn.Linear(channels * patch_size**2, width)
        self.time_in = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.label_in = nn.Embedding(num_classes + 1, width)
        self.blocks = nn.ModuleList(Block(width, heads, int(width * mlp_ratio)) for _ in range(depth))
        self.norm_out = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation_out = nn.Linear(width, 2 * width)
        self.register_buffer("positions_1ND", position_table(image_size // patch_size, width), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.label_in.weight, std=0.02)
        for layer in self.time_in:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
        # Zero gates make every block the identity at first (adaLN-zero).
        modulations = [block.modulation for block in self.blocks if isinstance(block, Block)]
        for modulation in [*modulations, self.modulation_out]:
            nn.init.zeros_(modulation.weight)

    def forward(self, x_BCHW: Tensor, t_B: Tensor, label_B: Tensor, cls_D: Tensor | None = None) -> Tensor:
        """tokens_BND; with `cls_D`, that token comes first, at position zero (N + 1 tokens)."""
        patches_BNP = F.unfold(x_BCHW, self.patch_size, stride=self.patch_size).transpose(1, 2)
        tokens_BND = self.patch_in(patches_BNP) + self.positions_1ND
        if cls_D is not None:
            tokens_BND = torch.cat([cls_D.expand(len(x_BCHW), 1, -1), tokens_BND], dim=1)
        condition_BD = self.time_in(time_features(t_B).to(tokens_BND.dtype)) + self.label_in(label_B)
        for block in self.blocks:
            tokens_BND = block(tokens_BND, condition_BD)
        shift, scale = self.modulation_out(F.silu(condition_BD))[:, None].chunk(2, dim=2)
        return self.norm_out(tokens_BND) * (1 + scale) + shift


class DiT(nn.Module):
    """Velocity network: x_BCHW (C, image_size, image_size), t_B in [0, 1], label_B int64 -> velocity_BCHW.

    Label `num_classes` is the null condition. The network is zero at initialisation. `analytic_skip` s adds
    the best velocity for data ~ N(0, s^2), which takes the linear part off the network.
    """

    def __init__(
        self,
        image_size: int,
        channels: int,
        num_classes: int,
        patch_size: int,
        width: int,
        depth: int,
        heads: int,
        mlp_ratio: float = 4.0,
        analytic_skip: float | None = None,
    ) -> None:
        super().__init__()
        trunk: dict[str, Any] = {
            "image_size": image_size,
            "channels": channels,
            "num_classes": num_classes,
            "patch_size": patch_size,
            "width": width,
            "depth": depth,
            "heads": heads,
            "mlp_ratio": mlp_ratio,
        }
        self.config: dict[str, Any] = {**trunk, "analytic_skip": analytic_skip}
        if analytic_skip is not None and analytic_skip <= 0:
            raise ConfigError(f"analytic_skip is {analytic_skip}: use the data's standard deviation, above 0")
        self.analytic_skip = analytic_skip
        self.trunk = Trunk(**trunk)
        self.head = nn.Linear(width, channels * patch_size**2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x_BCHW: Tensor, t_B: Tensor, label_B: Tensor) -> Tensor:
        patches_BPN = self.head(self.trunk(x_BCHW, t_B, label_B)).transpose(1, 2)
        patch_size = self.trunk.patch_size
        velocity_BCHW = F.fold(patches_BPN, x_BCHW.shape[2:], patch_size, stride=patch_size)
        if self.analytic_skip is not None:
            slope_B = gaussian_velocity_slope(t_B, self.analytic_skip).to(velocity_BCHW.dtype)
            velocity_BCHW = velocity_BCHW + along_batch(slope_B, x_BCHW) * x_BCHW
        return velocity_BCHW


def time_features(t_B: Tensor) -> Tensor:
    """Cosines and sines of 1000 t at frequencies 1 down to 1e-4: (B, 2 TIME_FREQUENCIES), float32 or 64."""
    # Never in bf16: its 8 bits would round 1000 t to steps of 4.
    t_B = t_B if t_B.dtype == torch.float64 else t_B.float()
    exponents = torch.arange(TIME_FREQUENCIES, dtype=t_B.dtype, device=t_B.device) / TIME_FREQUENCIES
    angles = 1000 * t_B[:, None] * torch.exp(-math.log(10_000) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def position_table(grid: int, width: int) -> Tensor:
    """Fixed 2-D sine-cosine positions of a grid x grid image, row-major, (1, grid^2, width).

    Fixed, since learned ones may stay untrained and leave a position-blind network with a plausible loss.
    """
    frequencies = torch.exp(-math.log(10_000) * torch.arange(width // 4) / (width // 4))
    angles = torch.arange(grid)[:, None] * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = axis[:, None].expand(-1, grid, -1), axis[None].expand(grid, -1, -1)
    return torch.cat([rows, columns], dim=2).reshape(1, grid * grid, width)
