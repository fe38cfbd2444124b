"""Fonts that cover many scripts: Pillow's own, else those that matplotlib ships."""

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
_NOWHERE = "\U0010ffff"
"""A code point that no font has a glyph for: what is drawn for it is what is drawn for every missing glyph."""


def font_for(texts: Iterable[str], size: int) -> Font | None:
    """A font with a glyph for every letter of these texts; None if no available font has them all."""
    letters = _letters(texts)
    return next((font for font in _fonts(size) if _drawn(font, letters) == len(letters)), None)


def font_of_most(texts: Iterable[str], size: int) -> Font:
    """The font with glyphs for most letters of these texts. Texts in several scripts may exceed every font."""
    letters = _letters(texts)
    return max(_fonts(size), key=lambda font: _drawn(font, letters))


def _letters(texts: Iterable[str]) -> set[str]:
    return {letter for text in texts for letter in text if not letter.isspace()}


@cache
def _fonts(size: int) -> tuple[Font, ...]:
    fonts: list[Font] = [ImageFont.load_default(size)]
    spec = find_spec("matplotlib")  # its font files are enough: matplotlib isn't imported
    if spec and spec.submodule_search_locations:
        path = Path(next(iter(spec.submodule_search_locations)), "mpl-data/fonts/ttf/DejaVuSans.ttf")
        if path.is_file():
            fonts.append(ImageFont.truetype(path, size))
    return tuple(fonts)


def _drawn(font: Font, letters: set[str]) -> int:
    """The number of letters that the font has a glyph for."""
    return sum(_draws(font, letter) for letter in letters)


def _draws(font: Font, letter: str) -> bool:
    masks = [font.getmask(each) for each in (letter, _NOWHERE)]
    return masks[0].size != masks[1].size or bytes(masks[0]) != bytes(masks[1])
