"""A picture of lines of tiles: images in coloured frames, with strips that show each expert's share, step by step.

Drawn at twice the size that it is shown at, so that its words are sharp on any screen. Shapes: S steps, K experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from PIL import Image, ImageColor, ImageDraw

from ddm_ray.pictures.fonts import Font, font_of_most

PAPER, INK, FAINT, EMPTY = "#ffffff", "#22252b", "#6b7280", "#f1f2f4"
TITLE, TEXT, SMALL, TINY = 46, 30, 24, 19
MIN_SIDE, MAX_SIDE = 80, 128
FRAME, STRIP, GAP, GROUP_GAP, MARGIN = 7, 28, 8, 18, 40
MAX_HEIGHT = 20_000
DARK = 140
"""Brightness, of 255, below which a colour takes white letters."""


@dataclass(frozen=True)
class Tile:
    """An image, the colour of its frame, and each expert's share in it at each step (S, K)."""

    image: Image.Image
    colour: str | None = None
    share_SK: np.ndarray | None = None


@dataclass(frozen=True)
class TileLine:
    """Tiles beside a label and a note. None leaves a place empty. `colour`: of a mark before the label.

    `words`: by group, what is written into its empty places.
    """

    label: str
    note: str
    tiles: Sequence[Tile | None]
    colour: str | None = None
    words: Sequence[str] = ()


@dataclass(frozen=True)
class TilePicture:
    """Sections of lines, each with a heading, between words.

    `groups` name equal groups of the `columns`; `colours` are those of the experts, and `numbers` theirs; none: from 0.
    """

    title: str
    sentence: str
    sections: Sequence[tuple[str, Sequence[TileLine]]]
    footnote: str
    groups: Sequence[str]
    columns: int
    colours: Sequence[str]
    numbers: Sequence[int] = ()

    def draw(self) -> Image.Image:
        """The picture, as high as its lines and words need."""
        return _Drawing(self).draw()


class _Drawing:
    def __init__(self, shown: TilePicture):
        self._shown = shown
        lines = [line for _, lines in shown.sections for line in lines]
        words = [shown.title, shown.sentence, *(word for line in lines for word in (line.label, line.note))]
        self._text, self._small, self._tiny = (font_of_most(words, size) for size in (TEXT, SMALL, TINY))
        sides = [side for line in lines for tile in line.tiles if tile for side in tile.image.size]
        self._side = min(MAX_SIDE, max([MIN_SIDE, *sides])) + 2 * FRAME
        widths = [max(self._text.getlength(line.label), self._small.getlength(line.note)) for line in lines]
        self._left = MARGIN + STRIP + GAP + round(max(widths)) + 2 * GAP
        self._in_group = shown.columns // max(1, len(shown.groups))
        self._x = [
            self._left + column * (self._side + GAP) + column // self._in_group * GROUP_GAP
            for column in range(shown.columns)
        ]
        self._width = self._x[-1] + self._side + MARGIN
        self._picture = Image.new("RGB", (self._width, MAX_HEIGHT), PAPER)
        self._draw = ImageDraw.Draw(self._picture)

    def draw(self) -> Image.Image:
        shown = self._shown
        y = self._words(shown.title, MARGIN, font_of_most([shown.title], TITLE), TITLE, INK, bold=True)
        y = self._words(shown.sentence, y + GAP, self._text, TEXT, INK)
        for heading, lines in shown.sections:
            y = self._words(heading, y + MARGIN // 2, self._text, TEXT, INK, bold=True)
            y = self._headings(y)
            for line in lines:
                y = self._line(line, y)
        y = self._words(shown.footnote, y + GAP, self._small, SMALL, FAINT)
        return self._picture.crop((0, 0, self._width, min(y + MARGIN, MAX_HEIGHT)))

    def _words(self, text: str, y: int, font: Font, size: int, colour: str, bold: bool = False) -> int:
        """Write the text in as many lines as it needs; the height below them."""
        for part in wrapped(text, font, self._width - 2 * MARGIN):
            self._draw.text((MARGIN, y + 0.7 * size), part, colour, font, "lm", stroke_width=0.5 if bold else 0)
            y += round(1.4 * size)
        return y

    def _headings(self, y: int) -> int:
        if not self._shown.groups:
            return y + GAP
        for number, name in enumerate(self._shown.groups):
            self._draw.text((self._middle(number), y + 0.7 * TEXT), name, FAINT, self._text, "mm")
        return y + round(1.4 * TEXT)

    def _middle(self, group: int) -> float:
        first, last = self._x[group * self._in_group], self._x[(group + 1) * self._in_group - 1]
        return (first + last + self._side) / 2

    def _line(self, line: TileLine, y: int) -> int:
        """Draw a line; the height below it."""
        middle, left = y + self._side / 2, MARGIN + STRIP + GAP
        if line.colour:
            self._draw.rectangle((MARGIN, y, MARGIN + STRIP // 2, y + self._side - 1), line.colour)
        self._draw.text((left, middle - 2), line.label, INK, self._text, "ld" if line.note else "lm")
        self._draw.text((left, middle + 4), line.note, FAINT, self._small, "la")
        for x, tile in zip(self._x, line.tiles, strict=False):
            self._tile(tile, x, y)
        for group, words in enumerate(line.words[: len(self._shown.groups)]):
            first, end = group * self._in_group, (group + 1) * self._in_group
            if empty := [x for x, tile in zip(self._x[first:end], line.tiles[first:end], strict=True) if tile is None]:
                place = ((empty[0] + empty[-1] + self._side) / 2, middle)
                self._draw.text(place, words, FAINT, self._small if len(empty) > 1 else self._tiny, "mm")
        strips = any(tile is not None and tile.share_SK is not None for tile in line.tiles)
        return y + self._side + GAP + (STRIP + GAP if strips else 0)

    def _tile(self, tile: Tile | None, x: int, y: int) -> None:
        box = (x, y, x + self._side - 1, y + self._side - 1)
        if tile is None:
            self._draw.rectangle(box, EMPTY)
            return
        edge = FRAME if tile.colour else 0
        if tile.colour:
            self._draw.rectangle(box, tile.colour)
        inner = self._side - 2 * edge
        self._picture.paste(
            tile.image.convert("RGB").resize((inner, inner), Image.Resampling.BICUBIC), (x + edge, y + edge)
        )
        if tile.share_SK is not None:
            self._strip(tile.share_SK, x, y + self._side)

    def _strip(self, share_SK: np.ndarray, left: int, top: int) -> None:
        edges = np.linspace(left, left + self._side, len(share_SK) + 1).round().astype(int).tolist()
        for step, share_K in enumerate(share_SK):
            levels = (top + STRIP * np.append(0, np.cumsum(share_K))).round().astype(int).tolist()
            for expert in np.flatnonzero(share_K).tolist():
                if levels[expert + 1] > levels[expert] and edges[step + 1] > edges[step]:
                    box = (edges[step], levels[expert], edges[step + 1] - 1, levels[expert + 1] - 1)
                    self._draw.rectangle(box, self._colour(expert))
        for first, end, expert in spans_of_experts(share_SK):
            room, middle = edges[end] - edges[first], (edges[first] + edges[end]) / 2
            number = self._shown.numbers[expert] if self._shown.numbers else expert
            words = [each for each in (f"expert {number}", f"{number}") if self._tiny.getlength(each) < room - 2]
            if words:
                ink = _ink_on(self._colour(expert))
                self._draw.text((middle, top + STRIP / 2 - 1), words[0], ink, self._tiny, "mm")

    def _colour(self, expert: int) -> str:
        return self._shown.colours[expert % len(self._shown.colours)]


def spans_of_experts(share_SK: np.ndarray) -> list[tuple[int, int, int]]:
    """First step, end and expert of each stretch of steps with one heaviest expert, where it has half or more."""
    heaviest_S = share_SK.argmax(axis=1)
    starts = [0, *(np.flatnonzero(np.diff(heaviest_S)) + 1).tolist(), len(heaviest_S)]
    every = [(first, end, int(heaviest_S[first])) for first, end in pairwise(starts)]
    return [(first, end, expert) for first, end, expert in every if share_SK[first:end, expert].mean() >= 0.5]


def wrapped(text: str, font: Font, width: float) -> list[str]:
    """The text in lines of at most this width, broken between words."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _ink_on(colour: str) -> str:
    red, green, blue = ImageColor.getrgb(colour)[:3]
    return PAPER if 0.299 * red + 0.587 * green + 0.114 * blue < DARK else INK
