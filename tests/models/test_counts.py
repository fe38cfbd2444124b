"""Parameters and FLOPs against published figures, to the last one where the difference can be named.

Models are built on the meta device. A DiT here has fixed positions, which aren't parameters, and predicts a velocity;
the published ones keep the positions as a parameter and predict a noise and a variance (twice the channels).
"""

import pytest
import torch
from diffusers import PixArtTransformer2DModel

from ddm_ray.models.dit import DiT
from ddm_ray.models.flops import forward_flops_per_row, num_parameters

SIZES = {"Ti": (192, 12, 3), "S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}
LATENTS = (4, 32, 32)
CLASSES = {"num_classes": 1000}
D, DEPTH = 1152, 28


def sizes(size: str, patch_size: int) -> dict:
    width, depth, heads = SIZES[size]
    latents = {"channels": LATENTS[0], "image_size": LATENTS[1]}
    return {**latents, "patch_size": patch_size, "width": width, "depth": depth, "heads": heads}


def dit(size: str, patch_size: int = 2, **form) -> DiT:
    with torch.device("meta"):
        return DiT(**sizes(size, patch_size), **{**CLASSES, **form})


def linear(width_in: int, width_out: int) -> int:
    return (width_in + 1) * width_out


def published(model: DiT) -> int:
    """Parameters with what the published DiT counts in addition: positions, and the head's variance channels."""
    _, tokens, width = model.trunk.positions_1ND.shape
    return num_parameters(model) + tokens * width + linear(width, model.head.out_features)


def test_dit_xl_2_is_the_published_one() -> None:
    model = dit("XL")
    assert num_parameters(model) == 674_816_272
    assert 674_816_272 + 294_912 + 18_448 == 675_129_632
    assert published(model) == 675_129_632


@pytest.mark.parametrize(
    ("size", "parameters", "millions"),
    [("S", 32_858_896, 33), ("B", 130_303_504, 130), ("L", 457_824_272, 458)],
)
def test_smaller_dits_are_the_published_ones(size: str, parameters: int, millions: int) -> None:
    assert num_parameters(dit(size)) == parameters
    # B/2 is 130.5 M with all that the published one counts.
    assert published(dit(size)) / 1e6 == pytest.approx(millions, abs=0.6)


@pytest.mark.parametrize(
    ("size", "patch_size", "multiply_adds", "giga"),
    [
        ("S", 2, 6_054_100_992, 6.06),
        ("B", 2, 23_001_956_352, 23.01),
        ("L", 2, 80_693_428_224, 80.71),
        ("XL", 2, 118_616_702_976, 118.64),
        ("XL", 4, 29_038_952_448, 29.05),
        ("XL", 8, 7_387_693_056, 7.39),
    ],
)
def test_forward_multiply_adds_are_the_published_ones(size, patch_size, multiply_adds: int, giga: float) -> None:
    # Counted: every matrix product, attention's two among them. Not: norms, activations, softmax, sums.
    assert forward_flops_per_row(dit(size, patch_size), LATENTS) == 2 * multiply_adds
    # DiT's table 4, its head with twice our channels; up to 0.02 G more are in its counter's way of counting.
    tokens, patch = (32 // patch_size) ** 2, 4 * patch_size**2
    assert (multiply_adds + tokens * SIZES[size][0] * patch) / 1e9 == pytest.approx(giga, abs=0.02)


def test_pixart_alpha_xl_2_is_the_published_one() -> None:
    model = dit("XL", num_classes=None, adaln="single", text_dim=4096)
    with torch.device("meta"):
        pixart = PixArtTransformer2DModel(sample_size=32, caption_channels=4096)
    # Of the published 611 M, only the head's variance channels aren't ours: its positions and its null text are
    # buffers, and it embeds no image size below 1024 pixels.
    assert num_parameters(pixart) == 610_856_096
    assert num_parameters(model) == 610_856_096 - linear(D, 16)
    per_block = linear(D, 3 * D) + linear(D, D) + 2 * linear(D, D) + linear(D, 2 * D)
    per_block += linear(D, 4 * D) + linear(4 * D, D) + 6 * D
    once = linear(16, D) + linear(256, D) + linear(D, D) + linear(D, 6 * D) + linear(4096, D) + linear(D, D)
    assert num_parameters(model) == DEPTH * per_block + once + 2 * D + linear(D, 16)
