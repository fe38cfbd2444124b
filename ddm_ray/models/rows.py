"""Rows of zeros as a network takes them, where a count or a compiler has no use for values."""

import torch
from torch import Tensor, nn

from ddm_ray.core.condition import Condition, Text


def rows_of_zeros(
    model: nn.Module,
    num_rows: int,
    image_shape: tuple[int, int, int],
    text_tokens: int = 0,
    num_kept: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor | Condition, ...]:
    """(x_BCHW, t_B, condition) for `model`, on torch's default device; with `num_kept`, so many tokens' numbers after.

    A text-conditioned model needs the number of its `text_tokens`, padding included.
    """
    x_BCHW, t_B = torch.zeros(num_rows, *image_shape, dtype=dtype), torch.zeros(num_rows)
    rows = x_BCHW, t_B, _condition(model, num_rows, text_tokens, dtype)
    if num_kept is None:
        return rows
    return *rows, torch.arange(num_kept).repeat(num_rows, 1)


def _condition(model: nn.Module, num_rows: int, text_tokens: int, dtype: torch.dtype) -> Condition:
    text_dim, pooled_dim = getattr(model, "text_dim", None), getattr(model, "pooled_dim", None)
    if text_dim is None:
        return torch.zeros(num_rows, dtype=torch.int64)
    assert text_tokens > 0
    return Text(
        torch.zeros(num_rows, text_tokens, text_dim, dtype=dtype),
        torch.ones(num_rows, text_tokens, dtype=torch.bool),
        None if pooled_dim is None else torch.zeros(num_rows, pooled_dim, dtype=dtype),
    )
