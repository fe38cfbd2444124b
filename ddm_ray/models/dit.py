"""The diffusion transformer (DiT: arXiv 2212.09748), class- or text-conditioned, and the trunk it shares.

Shapes: B rows, C channels, H and W of the image, N patches (tokens), M of them kept, D width, P values of a patch;
texts have L tokens of E channels.
"""

import math
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddm_ray.core.condition import Condition, Text
from ddm_ray.core.flow import append_dims, gaussian_velocity_slope
from ddm_ray.errors import ConfigError, SamplingError
from ddm_ray.models.blocks import (
    MODULATIONS,
    AdaLN,
    Block,
    CrossAttention,
    LinearModulation,
    Mlp,
    TableModulation,
    layer_norm,
)
from ddm_ray.models.network import Network

TIME_FREQUENCIES = 128


class Trunk(nn.Module):
    """Patches, time and condition to tokens_BND, after the final modulated norm: what DiT and Router share.

    With `num_classes`, conditions are int64 labels and label `num_classes` is the null one; with `text_dim`, Texts of
    that many channels, by cross-attention; with neither, conditions are ignored. `config` keeps the arguments. With
    `checkpoint_activations`, training keeps each block's input alone and computes the rest twice. ConfigError for
    sizes that don't divide, for an unknown `adaln`, and for labels and text at once.
    """

    checkpoint_activations: bool = False
    positions_1ND: Tensor

    def __init__(
        self,
        *,
        image_size: int,
        channels: int,
        num_classes: int | None,
        patch_size: int,
        width: int,
        depth: int,
        heads: int,
        mlp_ratio: float = 4.0,
        adaln: AdaLN = "zero",
        text_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {
            "image_size": image_size,
            "channels": channels,
            "num_classes": num_classes,
            "patch_size": patch_size,
            "width": width,
            "depth": depth,
            "heads": heads,
            "mlp_ratio": mlp_ratio,
            "adaln": adaln,
            "text_dim": text_dim,
        }
        if image_size % patch_size:
            raise ConfigError(f"image_size {image_size} isn't a multiple of patch_size {patch_size}")
        if width % heads or width % 4:
            raise ConfigError(f"width {width} must be a multiple of 4 and of heads ({heads})")
        if adaln not in get_args(AdaLN):
            raise ConfigError(f"adaln is {adaln!r}: use one of {', '.join(get_args(AdaLN))}")
        if num_classes is not None and text_dim is not None:
            raise ConfigError(f"a condition is a label (num_classes {num_classes}) or a text (text_dim {text_dim})")
        self.patch_size = patch_size
        self.grid = image_size // patch_size
        self.text_dim = text_dim
        self.patch_in = nn.Linear(channels * patch_size**2, width)
        self.time_in = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.label_in = None if num_classes is None else nn.Embedding(num_classes + 1, width)
        self.text_in = None if text_dim is None else Mlp(text_dim, width, width)
        self.shared_modulation = LinearModulation(width, MODULATIONS) if adaln == "single" else None
        self.blocks = nn.ModuleList(
            Block(width, heads, int(width * mlp_ratio), adaln, text_dim is not None) for _ in range(depth)
        )
        self.norm_out = layer_norm(width)
        self.modulation_out = (LinearModulation if adaln == "zero" else TableModulation)(width, 2)
        positions_1ND = position_table(self.grid, width).to(torch.get_default_device())
        self.register_buffer("positions_1ND", positions_1ND, persistent=False)
        self._initialise()

    def fill_table(self) -> None:
        """Make the table of positions, which no file of weights holds."""
        self.positions_1ND = position_table(self.grid, self.positions_1ND.shape[2])

    def enable_gradient_checkpointing(self) -> None:
        """Have training keep each block's input alone and compute the rest twice."""
        self.checkpoint_activations = True

    def disable_gradient_checkpointing(self) -> None:
        """Have training keep all activations."""
        self.checkpoint_activations = False

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for embedding in (self.label_in, self.text_in, self.time_in):
            for module in embedding.modules() if embedding is not None else ():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, std=0.02)
        # Closed gates and a closed way in for the text make every block the identity at first.
        for module in self.modules():
            if isinstance(module, LinearModulation):
                nn.init.zeros_(module.weight)
            elif isinstance(module, CrossAttention):
                nn.init.zeros_(module.out.weight)

    def forward(
        self,
        x_BCHW: Tensor,
        t_B: Tensor,
        condition: Condition,
        cls_D: Tensor | None = None,
        kept_BM: Tensor | None = None,
    ) -> Tensor:
        """tokens_BND; with `cls_D`, that token comes first, at position zero (N + 1 tokens).

        With `kept_BM` (see `patches`), of those tokens alone, (B, M, D): what the others hold is never looked at.
        SamplingError for labels where texts are due, texts where labels are, or texts of another width.
        """
        x_BCHW = x_BCHW.to(self.patch_in.weight.dtype)
        positions = self.positions_1ND if kept_BM is None else self.positions_1ND[0][kept_BM]
        # The buffer stays in fp32 where a loader casts weights alone.
        tokens_BND = self.patch_in(patches(x_BCHW, self.patch_size, kept_BM)) + positions.to(x_BCHW.dtype)
        if cls_D is not None:
            tokens_BND = torch.cat([cls_D.expand(len(x_BCHW), 1, -1), tokens_BND], dim=1)
        condition_BD = self.time_in(time_features(t_B).to(tokens_BND.dtype))
        text_BLD = mask_BL = None
        if self.label_in is not None:
            condition_BD = condition_BD + self.label_in(self._labels(condition))
        if self.text_in is not None:
            text = self._texts(condition)
            text_BLD, mask_BL = self.text_in(text.tokens_BLE.to(tokens_BND.dtype)), text.mask_BL
        # adaLN-single: what the blocks share is made once, and the last norm takes the condition itself, twice.
        shared = condition_BD if self.shared_modulation is None else self.shared_modulation(condition_BD)
        last = condition_BD if self.shared_modulation is None else condition_BD[:, None]
        again = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            rest = (tokens_BND, shared, text_BLD, mask_BL)
            # Blocks draw nothing at random, so that no generator's state need be kept.
            tokens_BND = (
                checkpoint(block, *rest, use_reentrant=False, preserve_rng_state=False) if again else block(*rest)
            )
        shift, scale = self.modulation_out(last).split(1, dim=1)
        return self.norm_out(tokens_BND) * (1 + scale) + shift

    def _labels(self, condition: Condition) -> Tensor:
        if isinstance(condition, Text):
            raise SamplingError("the model is conditioned on class labels and was given texts: give it labels")
        return condition

    def _texts(self, condition: Condition) -> Text:
        if not isinstance(condition, Text):
            raise SamplingError("the model is conditioned on texts and was given class labels: give it texts")
        if condition.tokens_BLE.shape[2] != self.text_dim:
            given = condition.tokens_BLE.shape[2]
            raise SamplingError(f"texts have {given} channels, the model takes {self.text_dim}: use its text encoder")
        return condition


class DiT(Network):
    """Velocity network: x_BCHW (C, image_size, image_size), t_B in [0, 1], condition -> velocity_BCHW.

    Takes the trunk's arguments. Zero at initialisation. `analytic_skip` s adds the best velocity for data ~ N(0, s^2),
    which takes the linear part off the network (linear path, velocity prediction). ConfigError for s <= 0.
    """

    parts = (Trunk,)

    def __init__(self, *, analytic_skip: float | None = None, **trunk: Any) -> None:
        super().__init__()
        if analytic_skip is not None and analytic_skip <= 0:
            raise ConfigError(f"analytic_skip is {analytic_skip}: use the data's standard deviation, above 0")
        self.analytic_skip = analytic_skip
        self.trunk = Trunk(**trunk)
        self.config = {**self.trunk.config, "analytic_skip": analytic_skip}
        self.text_dim = self.trunk.text_dim
        self.head = nn.Linear(self.config["width"], self.config["channels"] * self.config["patch_size"] ** 2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x_BCHW: Tensor, t_B: Tensor, condition: Condition, kept_BM: Tensor | None = None) -> Tensor:
        """With `kept_BM` (see `patches`), of and from those patches alone; the network says 0 of the others."""
        patches_BNP = self.head(self.trunk(x_BCHW, t_B, condition, kept_BM=kept_BM))
        if kept_BM is not None:
            whole_BNP = patches_BNP.new_zeros(len(x_BCHW), self.trunk.grid**2, patches_BNP.shape[2])
            patches_BNP = whole_BNP.scatter(1, kept_BM[:, :, None].expand_as(patches_BNP), patches_BNP)
        velocity_BCHW = image_of(patches_BNP, self.trunk.patch_size, self.trunk.grid)
        if self.analytic_skip is not None:
            slope_B = gaussian_velocity_slope(t_B, self.analytic_skip).to(velocity_BCHW.dtype)
            velocity_BCHW = velocity_BCHW + append_dims(slope_B, x_BCHW) * x_BCHW
        return velocity_BCHW


def patches(x_BCHW: Tensor, patch_size: int, kept_BM: Tensor | None = None) -> Tensor:
    """Squares of patch_size^2 pixels, row-major, channel-major within one: (B, N, P).

    With `kept_BM`, of each image the patches of these numbers alone (int64, 0 .. N - 1, none twice): (B, M, P).
    """
    # As a copy, and not by `F.unfold`, which on a GPU is one kernel for each row of the batch.
    squares_BChpwp = x_BCHW.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))
    patches_BNP = squares_BChpwp.permute(0, 1, 3, 5, 2, 4).flatten(4).flatten(1, 3).transpose(1, 2)
    if kept_BM is None:
        return patches_BNP
    return patches_BNP.gather(1, kept_BM[:, :, None].expand(-1, -1, patches_BNP.shape[2]))


def image_of(patches_BNP: Tensor, patch_size: int, grid: int) -> Tensor:
    """The inverse of `patches` where all are kept, of grid x grid patches: x_BCHW."""
    squares_BhwCpp = patches_BNP.unflatten(1, (grid, grid)).unflatten(3, (-1, patch_size, patch_size))
    return squares_BhwCpp.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def time_features(t_B: Tensor) -> Tensor:
    """Cosines and sines of 1000 t at frequencies 1 down to 1e-4: (B, 2 TIME_FREQUENCIES), float32 or 64."""
    # Never in bf16: its 8 bits would round 1000 t to steps of 4.
    t_B = t_B if t_B.dtype == torch.float64 else t_B.float()
    exponents = torch.arange(TIME_FREQUENCIES, dtype=t_B.dtype, device=t_B.device) / TIME_FREQUENCIES
    angles = 1000 * t_B[:, None] * torch.exp(-math.log(10_000) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def position_table(grid: int, width: int) -> Tensor:
    """Fixed 2-D sine-cosine positions of a grid x grid image, row-major, (1, grid^2, width).

    The first half of the channels tells the column, the second the row, sines before cosines, as in DiT's
    published weights. Fixed, since learned ones may stay untrained: a position-blind network has a plausible loss.
    """
    # On the CPU, wherever the model is built: on meta torch would load its compiler for it.
    exponents = torch.arange(width // 4, dtype=torch.float64, device="cpu") / (width // 4)
    angles = torch.arange(grid, device="cpu")[:, None] * torch.exp(-math.log(10_000) * exponents)
    axis = torch.cat([angles.sin(), angles.cos()], dim=1).float()
    rows, columns = axis[:, None].expand(-1, grid, -1), axis[None].expand(grid, -1, -1)
    return torch.cat([columns, rows], dim=2).reshape(1, grid * grid, width)
