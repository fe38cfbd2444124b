"""Pictures of many small images in labelled rows. Shapes: B images, C channels, H, W."""

from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ddm_ray.pictures.fonts import font_of_most
from ddm_ray.pictures.images import to_pil, to_unit

PAPER, INK = (255, 255, 255), (40, 40, 48)
MARGIN, FONT_SIZE, HEADING = 8, 15, 22
TILE = 48


@dataclass(frozen=True)
class GridRow:
    """A label and the images beside it, (B, C, H, W) in [-1, 1]."""

    label: str
    images_BCHW: Tensor


def grid(rows: list[GridRow], headings: list[str] | None = None) -> Image.Image:
    """Draw the rows below each other, every image enlarged smoothly, by a whole factor, to about TILE pixels.

    `headings` name equal groups of columns. All images have one shape. Shorter rows leave blank paper at their end.
    """
    num_columns = max(len(row.images_BCHW) for row in rows)
    height, width = rows[0].images_BCHW.shape[2:]
    scale = max(1, round(TILE / max(height, width)))
    tile_h, tile_w = height * scale, width * scale
    gap = max(2, scale // 2)
    font = font_of_most([*(row.label for row in rows), *(headings or [])], FONT_SIZE)
    left = MARGIN + max(round(font.getlength(row.label)) for row in rows) + MARGIN
    top = MARGIN + (HEADING if headings else 0)
    size = (left + num_columns * (tile_w + gap) + MARGIN, top + len(rows) * (tile_h + gap) + MARGIN)
    picture = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(picture)
    group = num_columns // len(headings) if headings else 0
    for number, heading in enumerate(headings or []):
        span = group * (tile_w + gap)
        middle = (left + number * span + (span - gap) / 2, MARGIN + FONT_SIZE / 2)
        draw.text(middle, _fitted(heading, span, font), INK, font, anchor="mm")
    for line, row in enumerate(rows):
        y = top + line * (tile_h + gap)
        draw.text((left - MARGIN, y + tile_h / 2), row.label, INK, font, anchor="rm")
        for column, image in enumerate(to_pil(to_unit(row.images_BCHW))):
            enlarged = image.convert("RGB").resize((tile_w, tile_h), Image.Resampling.BICUBIC)
            picture.paste(enlarged, (left + column * (tile_w + gap), y))
    return picture


def _fitted(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    while len(text) > 1 and font.getlength(text) > width:
        text = text[:-1]
    return text
