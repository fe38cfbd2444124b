"""Parameters and FLOPs against published figures, to the last one where the difference can be named.

Models are built on the meta device. A DiT here has fixed positions, which aren't parameters, and predicts a velocity;
the published ones keep the positions as a parameter and predict a noise and a variance (twice the channels).
"""

import pytest
import torch
from diffusers import PixArtTransformer2DModel

from ddm_ray.config import DenoiserConfig
from ddm_ray.models.dit import DiT
from ddm_ray.models.flops import forward_flops_per_row, num_parameters, training_bytes, weights_bytes
from ddm_ray.models.router import Router

SIZES = {"Ti": (192, 12, 3), "S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "XL": (1152, 28, 16)}
LATENTS = (4, 32, 32)
CLASSES = {"num_classes": 1000}
TEXT = {"num_classes": None, "text_dim": 768}
D, DEPTH = 1152, 28


def sizes(size: str, patch_size: int) -> dict:
    width, depth, heads = SIZES[size]
    latents = {"channels": LATENTS[0], "image_size": LATENTS[1]}
    return {**latents, "patch_size": patch_size, "width": width, "depth": depth, "heads": heads}


def dit(size: str, patch_size: int = 2, **form) -> DiT:
    with torch.device("meta"):
        return DiT(**sizes(size, patch_size), **{**CLASSES, **form})


def router(size: str, **form) -> Router:
    with torch.device("meta"):
        return Router(num_experts=8, **sizes(size, 2), **form)


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


@pytest.mark.parametrize(("name", "millions"), [("S", 33), ("B", 130), ("L", 458), ("XL", 675)])
def test_dits_by_their_names_have_the_published_size(name: str, millions: int) -> None:
    config = DenoiserConfig.model_validate({"size": f"DiT-{name}/2"})
    with torch.device("meta"):
        model = DiT(image_size=32, channels=4, num_classes=1000, **config.model_dump())
    # DiT's table 1, in whole millions: without its positions and its learned variance, within half a million.
    assert round(num_parameters(model) / 1e6) == millions


def test_the_tiny_size_and_larger_patches() -> None:
    assert num_parameters(dit("Ti")) == 8_356_240
    assert num_parameters(dit("XL", patch_size=4)) == 674_926_912
    assert num_parameters(dit("XL", patch_size=8)) == 675_369_472


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


def test_multiply_adds_of_dit_xl_2_by_hand() -> None:
    tokens, patch = 256, 16
    block = tokens * (4 * D * D + 8 * D * D) + 2 * tokens**2 * D + 6 * D * D
    ends = 2 * tokens * patch * D + (256 * D + D * D) + 2 * D * D
    assert DEPTH * block + ends == 118_616_702_976


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


def test_paris_is_nearly_the_published_one() -> None:
    expert = num_parameters(dit("XL", adaln="single", **TEXT))
    assert expert == 607_003_792
    # Published: 605 M each, 4.84 B together. The third of a percent is of the size of the text's projection, whose
    # form isn't published: one linear layer instead of an MLP, for example, takes off 1.3 M.
    assert expert / 605e6 == pytest.approx(1, abs=0.004)
    assert linear(768, D) + linear(D, D) == 2_214_144
    # Its router sees no text: published as 129 M.
    assert num_parameters(router("B", num_classes=None)) == 129_529_352
    assert 129_529_352 // 10**6 == 129


def test_the_papers_text_conditioned_expert_is_not_explained() -> None:
    expert = num_parameters(dit("XL", **TEXT))
    cross_attention, projection = linear(D, D) * 4, linear(768, D) + linear(D, D)
    # DiT-XL/2 without its labels, and texts by cross-attention as in PixArt-alpha.
    assert expert == num_parameters(dit("XL")) - 1001 * D + DEPTH * cross_attention + projection
    assert expert == 824_641_936
    # The paper (arXiv 2501.05450) says 895 M, for the same width, depth and heads: 70.4 M more.
    assert 895_000_000 - expert == 70_358_064
    # A norm, a shift, a scale for the cross-attention would be two more vectors of modulation a block ...
    assert DEPTH * 2 * linear(D, D) == 74_382_336
    # ... and 4 M too many; the same in its router would be 14 M too many there. So what it has, we don't know.
    assert expert + 74_382_336 == 899_024_272


def test_the_papers_text_conditioned_router_is_nearly_explained() -> None:
    total = num_parameters(router("B", **TEXT))
    assert total == 159_058_952
    # Published: 158 M. CLIP's tokens are as wide as this router: without their projection, it is 157.9 M.
    projection = 2 * linear(768, 768)
    assert total - projection == 157_877_768
    assert round((total - projection) / 1e6) == 158
    assert total - num_parameters(router("B", num_classes=None)) == 12 * 4 * linear(768, 768) + projection


def test_a_tiny_router_costs_little_of_an_expert() -> None:
    tiny = router("Ti", **CLASSES)
    share = forward_flops_per_row(tiny, LATENTS) / forward_flops_per_row(dit("XL"), LATENTS)
    assert 0.01 < share < 0.03
    with_text = router("Ti", **TEXT)
    expert = forward_flops_per_row(dit("XL", **TEXT), LATENTS, text_tokens=77)
    assert 0.01 < forward_flops_per_row(with_text, LATENTS, text_tokens=77) / expert < 0.03


def test_memory_of_an_expert() -> None:
    model = dit("XL")
    assert weights_bytes(model, torch.bfloat16) == 2 * 674_816_272
    assert weights_bytes(model, torch.float32) == 4 * 674_816_272
    assert training_bytes(model) == 20 * 674_816_272
