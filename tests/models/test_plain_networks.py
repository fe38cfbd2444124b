"""Denoiser and router against plain tensor functions, written from the papers' descriptions, on the same weights.

Shapes: B rows, N patches, D width, L text tokens, E their channels, K experts.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddm_ray.core.condition import Text
from ddm_ray.models.dit import DiT
from ddm_ray.models.router import Router

TEXT_DIM, TOKENS, NUM_EXPERTS, PATCH, HEADS = 6, 5, 3, 2, 2
SIZE = {"image_size": 8, "channels": 4, "patch_size": PATCH, "width": 16, "depth": 2, "heads": HEADS}
CLASSES, TEXT, NOTHING = {"num_classes": 5}, {"num_classes": None, "text_dim": TEXT_DIM}, {"num_classes": None}
Weights = dict[str, Tensor]


def network(kind: Any, **sizes: Any) -> Any:
    """One whose gates are open, as training leaves them."""
    torch.manual_seed(0)
    model = kind(**SIZE, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


def inputs() -> tuple[Tensor, Tensor]:
    """Four rows, in float64: in float32 an angle of 1000 t is known to no better than 6e-5."""
    generator = torch.Generator().manual_seed(1)
    x_BCHW = torch.randn(4, 4, 8, 8, generator=generator, dtype=torch.float64)
    return x_BCHW, torch.tensor([0.0, 0.2501, 0.9, 1.0], dtype=torch.float64)


def condition(kind: dict[str, Any]) -> Any:
    if kind is not TEXT:
        return torch.tensor([0, 4, 5, 2])
    tokens_BLE = torch.randn(4, TOKENS, TEXT_DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return Text(tokens_BLE, torch.arange(TOKENS) < torch.tensor([1, 4, TOKENS, 2])[:, None])


@torch.no_grad()
@pytest.mark.parametrize("adaln", ["zero", "single"])
@pytest.mark.parametrize("kind", [CLASSES, TEXT, NOTHING])
def test_the_denoiser_is_the_plain_one(kind: dict[str, Any], adaln: str) -> None:
    model = network(DiT, **kind, adaln=adaln)
    given = (*inputs(), condition(kind))
    expected_BCHW = velocity(model.state_dict(), *given)
    assert expected_BCHW.std() > 0.1
    # The table of positions is kept in float32.
    torch.testing.assert_close(model(*given), expected_BCHW, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", [CLASSES, TEXT, NOTHING])
def test_the_router_is_the_plain_one(kind: dict[str, Any]) -> None:
    model = network(Router, num_experts=NUM_EXPERTS, **kind)
    given = (*inputs(), condition(kind))
    expected_BK = logits(model.state_dict(), *given)
    assert expected_BK.std() > 0.1
    torch.testing.assert_close(model(*given), expected_BK, atol=1e-5, rtol=0)


def velocity(w: Weights, x: Tensor, t: Tensor, given: Any) -> Tensor:
    values_BNP = linear(w, "head", trunk(w, patches(w, x), t, given))
    painted, across = torch.empty_like(x), x.shape[3] // PATCH
    for n in range(values_BNP.shape[1]):
        row, column = PATCH * (n // across), PATCH * (n % across)
        painted[:, :, row : row + PATCH, column : column + PATCH] = values_BNP[:, n].reshape(-1, 4, PATCH, PATCH)
    return painted


def logits(w: Weights, x: Tensor, t: Tensor, given: Any) -> Tensor:
    image_BND = patches(w, x)
    first_B1D = w["cls_D"].expand(len(x), 1, -1)
    return linear(w, "head", trunk(w, torch.cat([first_B1D, image_BND], dim=1), t, given)[:, 0])


def trunk(w: Weights, tokens_BND: Tensor, t: Tensor, given: Any) -> Tensor:
    angles = 1000 * t[:, None] * 10_000 ** (-torch.arange(128, dtype=t.dtype) / 128)
    features = torch.cat([torch.cos(angles), torch.sin(angles)], dim=1)
    time_BD = linear(w, "trunk.time_in.2", F.silu(linear(w, "trunk.time_in.0", features)))
    text = mask = shared_B6D = None
    if "trunk.label_in.weight" in w:
        time_BD = time_BD + w["trunk.label_in.weight"][given]
    if "trunk.text_in.fc1.weight" in w:
        text, mask = mlp(w, "trunk.text_in", given.tokens_BLE), given.mask_BL
    if "trunk.shared_modulation.weight" in w:
        shared_B6D = modulations(w, "trunk.shared_modulation", time_BD)
    for number in range(SIZE["depth"]):
        block = f"trunk.blocks.{number}."
        if shared_B6D is None:
            six_B6D = modulations(w, block + "modulation", time_BD)
        else:
            six_B6D = w[block + "modulation.table_MD"] + shared_B6D
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = six_B6D.unbind(1)
        query, key, value = linear(w, block + "attention.qkv", modulated(tokens_BND, shift_a, scale_a)).chunk(3, dim=2)
        attended = linear(w, block + "attention.proj", attention(query, key, value, None))
        tokens_BND = tokens_BND + gate_a[:, None] * attended
        if text is not None:
            query = linear(w, block + "cross_attention.query", tokens_BND)
            key, value = linear(w, block + "cross_attention.key_value", text).chunk(2, dim=2)
            tokens_BND = tokens_BND + linear(w, block + "cross_attention.out", attention(query, key, value, mask))
        tokens_BND = tokens_BND + gate_m[:, None] * mlp(w, block + "mlp", modulated(tokens_BND, shift_m, scale_m))
    if shared_B6D is None:
        two_B2D = modulations(w, "trunk.modulation_out", time_BD)
    else:
        two_B2D = w["trunk.modulation_out.table_MD"] + time_BD[:, None]
    return modulated(tokens_BND, *two_B2D.unbind(1))


def patches(w: Weights, x: Tensor) -> Tensor:
    weight = w["trunk.patch_in.weight"].reshape(-1, 4, PATCH, PATCH)
    embedded = F.conv2d(x, weight, w["trunk.patch_in.bias"], stride=PATCH).flatten(2).transpose(1, 2)
    return embedded + positions(x.shape[3] // PATCH, embedded.shape[2])


def positions(grid: int, width: int) -> Tensor:
    """(N, D): half for the column, half for the row, each of sines and then cosines."""
    table, quarter = torch.zeros(grid * grid, width, dtype=torch.float64), width // 4
    for row in range(grid):
        for column in range(grid):
            for i in range(quarter):
                frequency = 10_000 ** (-i / quarter)
                for half, place in ((0, column), (1, row)):
                    at = half * width // 2 + i
                    table[row * grid + column, at] = math.sin(place * frequency)
                    table[row * grid + column, at + quarter] = math.cos(place * frequency)
    return table


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    mixed = []
    for q, k, v in zip(query.chunk(HEADS, 2), key.chunk(HEADS, 2), value.chunk(HEADS, 2), strict=True):
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[2])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, :], -math.inf)
        mixed.append(scores.softmax(dim=2) @ v)
    return torch.cat(mixed, dim=2)


def modulations(w: Weights, name: str, time_BD: Tensor) -> Tensor:
    return linear(w, name, F.silu(time_BD)).unflatten(1, (-1, time_BD.shape[1]))


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[2:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


def mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(w, name + ".fc2", F.gelu(linear(w, name + ".fc1", x), approximate="tanh"))


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[name + ".weight"].T + w[name + ".bias"]
