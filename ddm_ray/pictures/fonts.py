"""Fonts that letters of many scripts can be drawn with: Pillow's own, else those that matplotlib brings."""

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
_NOWHERE = "\U0010ffff"
"""A code that no font has a picture of: what is drawn for it stands for all that are missing."""


def font_for(texts: Iterable[str], size: int) -> Font | None:
    """A font that has a picture of every letter of these texts; None where none that is here has."""
    letters = {letter for text in texts for letter in text if not letter.isspace()}
    return next((font for font in _fonts(size) if all(_draws(font, letter) for letter in letters)), None)


@cache
def _fonts(size: int) -> tuple[Font, ...]:
    fonts: list[Font] = [ImageFont.load_default(size)]
    spec = find_spec("matplotlib")  # its files alone
    if spec and spec.submodule_search_locations:
        path = Path(next(iter(spec.submodule_search_locations)), "mpl-data/fonts/ttf/DejaVuSans.ttf")
        if path.is_file():
            fonts.append(ImageFont.truetype(path, size))
    return tuple(fonts)


def _draws(font: Font, letter: str) -> bool:
    masks = [font.getmask(each) for each in (letter, _NOWHERE)]
    return masks[0].size != masks[1].size or bytes(masks[0]) != bytes(masks[1])
