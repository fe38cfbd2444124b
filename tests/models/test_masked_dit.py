"""A DiT that is given some of an image's tokens: it sees those alone, and says what it would say of all of them."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from ddm_ray.core.condition import Condition
from ddm_ray.models.dit import DiT, patches
from tests.models.test_text_condition import CLASSES, COMBINATIONS, condition, inputs, perturbed

ROWS, TOKENS = 4, 16


def kept_tokens(num_kept: int, rows: int = ROWS) -> Tensor:
    """Other ones in every row."""
    generator = torch.Generator().manual_seed(3)
    order_BN = torch.stack([torch.randperm(TOKENS, generator=generator) for _ in range(rows)])
    return order_BN[:, :num_kept].sort(1).values


def pixels_of(kept_BM: Tensor) -> Tensor:
    """(B, 1, 8, 8), true where a kept token's pixels are."""
    kept_BN = torch.zeros(len(kept_BM), TOKENS).scatter(1, kept_BM, 1.0)
    return kept_BN.view(-1, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3).bool()


def test_patches_are_numbered_row_by_row_and_hold_channels_first() -> None:
    x_BCHW = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6).float()
    all_patches = patches(x_BCHW, 2)
    assert all_patches.shape == (2, 6, 12)
    for number in range(6):
        row, column = 2 * (number // 3), 2 * (number % 3)
        assert torch.equal(all_patches[:, number], x_BCHW[:, :, row : row + 2, column : column + 2].flatten(1))
    kept_BM = torch.tensor([[0, 5], [1, 2]])
    assert torch.equal(patches(x_BCHW, 2, kept_BM), torch.stack([all_patches[0, [0, 5]], all_patches[1, [1, 2]]]))


@pytest.mark.parametrize(("adaln", "kind"), COMBINATIONS)
@pytest.mark.parametrize("skip", [None, 0.5])
def test_with_all_tokens_kept_nothing_changes(adaln: str, kind: dict, skip: float | None) -> None:
    model, asked = perturbed(adaln=adaln, analytic_skip=skip, **kind).double(), condition(kind, dtype=torch.float64)
    rows = inputs(dtype=torch.float64)
    everything = torch.arange(TOKENS).expand(ROWS, TOKENS)
    torch.testing.assert_close(model(*rows, asked, everything), model(*rows, asked), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("adaln", "kind"), COMBINATIONS)
def test_dropped_pixels_are_neither_seen_nor_told(adaln: str, kind: dict) -> None:
    model, asked, kept_BM = perturbed(adaln=adaln, **kind), condition(kind), kept_tokens(5)
    x_BCHW, t_B = inputs()
    x_BCHW.requires_grad_()
    pixels = pixels_of(kept_BM)
    output = model(x_BCHW, t_B, asked, kept_BM)
    assert (output == 0)[~pixels.expand_as(output)].all()
    assert (output != 0)[pixels.expand_as(output)].all()
    output.square().sum().backward()
    assert (x_BCHW.grad == 0)[~pixels.expand_as(output)].all()
    assert (x_BCHW.grad != 0)[pixels.expand_as(output)].all()
    poisoned = torch.where(pixels, x_BCHW.detach(), float("nan"))
    assert torch.equal(model(poisoned, t_B, asked, kept_BM), output)


def test_the_skip_is_told_of_every_pixel() -> None:
    x_BCHW, t_B = inputs()
    kept_BM, labels = kept_tokens(5), torch.arange(ROWS)
    sizes = {"image_size": 8, "channels": 2, "patch_size": 2, "width": 16, "depth": 1, "heads": 4}
    model = DiT(**sizes, **CLASSES, analytic_skip=0.5)
    assert torch.equal(model(x_BCHW, t_B, labels % 4, kept_BM), model(x_BCHW, t_B, labels % 4))


def of_one_row(model: DiT, x_BCHW: Tensor, t_B: Tensor, asked: Condition, kept_BM: Tensor) -> Tensor:
    rows = [model(x_BCHW[[b]], t_B[[b]], asked[[b]], kept_BM[[b]]) for b in range(ROWS)]
    return torch.cat(rows)


def test_each_row_has_tokens_of_its_own() -> None:
    model, kept_BM, labels = perturbed(**CLASSES).double(), kept_tokens(6), torch.arange(ROWS) % 4
    rows = inputs(dtype=torch.float64)
    together = model(*rows, labels, kept_BM)
    torch.testing.assert_close(together, of_one_row(model, *rows, labels, kept_BM), rtol=1e-12, atol=1e-12)


def test_a_token_keeps_its_place() -> None:
    """With gates closed tokens don't meet, so each says the same whichever others there are."""
    model = perturbed(**CLASSES)
    for block in model.trunk.blocks:
        block.modulation.weight.data.zero_()
        block.modulation.bias.data.zero_()
    x_BCHW, t_B = inputs(rows=1)
    unmasked = model(x_BCHW, t_B, torch.tensor([1]))
    assert len(unmasked.unique()) == unmasked.numel()
    for pair in combinations(range(0, TOKENS, 3), 2):
        kept_BM = torch.tensor([pair])
        alone = model(x_BCHW, t_B, torch.tensor([1]), kept_BM)
        torch.testing.assert_close(alone, unmasked * pixels_of(kept_BM), rtol=1e-5, atol=1e-6)
