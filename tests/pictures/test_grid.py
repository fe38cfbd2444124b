"""Pictures of many small images: each in its place, enlarged, in its own colours."""

import io

import numpy as np
import torch
from PIL import Image

from ddm_ray.pictures.grid import GridRow, grid
from ddm_ray.pictures.png import to_png


def tile(picture: Image.Image, column: int, line: int, left: int, top: int) -> np.ndarray:
    x, y = left + column * 51, top + line * 51
    return np.asarray(picture)[y : y + 48, x : x + 48]


def test_grid_enlarges_each_image_in_its_place() -> None:
    """8x8 images become 48x48 tiles with gaps of 3, in lines; the last tiles end 8 + 3 from the edge."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(5, 1, 8, 8, generator=random) * 2 - 1
    picture = grid([GridRow("one", images), GridRow("another", images[:3])], ["a"])
    left, top = picture.width - 8 - 5 * 51, picture.height - 8 - 2 * 51
    levels = ((images + 1) / 2 * 255).round().numpy()
    for column, line in ((0, 0), (4, 0), (2, 1)):
        middles = tile(picture, column, line, left, top)[..., 0].reshape(8, 6, 8, 6)[:, 2:4, :, 2:4].mean((1, 3))
        nearest = [np.abs(middles - level[0]).mean() for level in levels]
        assert np.argmin(nearest) == column
        assert min(nearest) < 20 < sorted(nearest)[1]
    assert (tile(picture, 4, 1, left, top) == 255).all()
    assert (np.asarray(picture)[:, :left] < 100).any()


def test_grid_keeps_colours() -> None:
    red = torch.stack([torch.ones(8, 8), -torch.ones(8, 8), -torch.ones(8, 8)])
    assert (255, 0, 0) in {colour for _, colour in grid([GridRow("red", red[None])]).getcolors()}


def test_png_reads_back() -> None:
    picture = grid([GridRow("x", torch.zeros(1, 1, 8, 8))])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(to_png(picture)))), np.asarray(picture))
