"""Transformer blocks of the denoiser and the router, shifted, scaled and gated by the condition.

Shapes: B rows, N image tokens, L text tokens, D width, M vectors of a modulation, h heads.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AdaLN = Literal["zero", "single"]
"""Source of the modulations: a Linear in every block (DiT), or one for all and a table a block (PixArt-alpha)."""

MODULATIONS = 6


def layer_norm(width: int) -> nn.LayerNorm:
    """Without weight and bias: the condition gives them."""
    return nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)


class LinearModulation(nn.Linear):
    """condition_BD -> M vectors a row, (B, M, D) (adaLN-zero: arXiv 2212.09748, section 3.2)."""

    def __init__(self, width: int, num_vectors: int) -> None:
        super().__init__(width, num_vectors * width)

    def forward(self, condition_BD: Tensor) -> Tensor:
        return super().forward(F.silu(condition_BD)).unflatten(1, (-1, self.in_features))


class TableModulation(nn.Module):
    """A learned table added to vectors_BMD that all blocks share (adaLN-single: arXiv 2310.00426, section 2.3).

    Zero at initialisation, so that gates are closed as with adaLN-zero; PixArt-alpha's start small and random.
    """

    def __init__(self, width: int, num_vectors: int) -> None:
        super().__init__()
        self.table_MD = nn.Parameter(torch.zeros(num_vectors, width))

    def forward(self, vectors_BMD: Tensor) -> Tensor:
        return self.table_MD + vectors_BMD


def heads_of(together_BNX: Tensor, count: int, heads: int) -> list[Tensor]:
    """Views (B, h, N, d) of the `count` equal parts that one Linear has made, X = count * h * d."""
    # In chunks: the gradient of a permuted whole's `unbind` is two copies, theirs is one.
    return [part_BND.unflatten(2, (heads, -1)).transpose(1, 2) for part_BND in together_BNX.chunk(count, dim=2)]


class SelfAttention(nn.Module):
    """tokens_BND look at each other. Parameters are named as in timm and DiT's checkpoints, here and in Mlp.

    Not timm's own: importing that takes longer than anything else of ours when a killed worker starts again.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not divisible by {heads} heads")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        query_BhNd, key_BhNd, value_BhNd = heads_of(self.qkv(tokens_BND), 3, self.heads)
        mixed_BhNd = F.scaled_dot_product_attention(query_BhNd, key_BhNd, value_BhNd)
        return self.proj(mixed_BhNd.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers, with GELU in its tanh form between them."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CrossAttention(nn.Module):
    """tokens_BND look at those of text_BLD where mask_BL is true, one a row at least."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens_BND: Tensor, text_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        query_BhNd = self.query(tokens_BND).unflatten(2, (self.heads, -1)).transpose(1, 2)
        key_BhLd, value_BhLd = heads_of(self.key_value(text_BLD), 2, self.heads)
        mixed_BhNd = F.scaled_dot_product_attention(query_BhNd, key_BhLd, value_BhLd, mask_BL[:, None, None])
        return self.out(mixed_BhNd.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Self-attention, cross-attention where there is text, and MLP.

    Text enters as in PixArt-alpha: tokens neither normalised nor gated (arXiv 2310.00426, section 2.3).
    """

    def __init__(self, width: int, heads: int, hidden: int, adaln: AdaLN, text: bool) -> None:
        super().__init__()
        self.norm_attention = layer_norm(width)
        self.attention = SelfAttention(width, heads)
        self.cross_attention = CrossAttention(width, heads) if text else None
        self.norm_mlp = layer_norm(width)
        self.mlp = Mlp(width, hidden, width)
        self.modulation = (LinearModulation if adaln == "zero" else TableModulation)(width, MODULATIONS)

    def forward(
        self,
        tokens_BND: Tensor,
        condition: Tensor,
        text_BLD: Tensor | None = None,
        mask_BL: Tensor | None = None,
    ) -> Tensor:
        """tokens_BND; `condition` is what the modulation takes: (B, D), or (B, 6, D) for adaLN-single."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition).split(1, dim=1)
        attended = self.attention(self.norm_attention(tokens_BND) * (1 + scale_a) + shift_a)
        tokens_BND = tokens_BND + gate_a * attended
        if self.cross_attention is not None:
            tokens_BND = tokens_BND + self.cross_attention(tokens_BND, text_BLD, mask_BL)
        return tokens_BND + gate_m * self.mlp(self.norm_mlp(tokens_BND) * (1 + scale_m) + shift_m)
