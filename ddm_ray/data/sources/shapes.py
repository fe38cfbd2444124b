"""Procedural shapes: a source that needs neither network nor disk."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np

from ddm_ray.core.streams import stream
from ddm_ray.data.sources.chunks import Encoded, EncodedChunk, Listing, Unit, chunked
from ddm_ray.data.sources.named import NamedSource

SIDE = 16
UNIT_ROWS = 4096
FAMILIES = (
    "disk",
    "ring",
    "square",
    "frame",
    "triangle",
    "cross",
    "saltire",
    "rows",
    "columns",
    "diagonals",
    "checkers",
    "dots",
)


@dataclass(frozen=True)
class Shapes(NamedSource):
    """`count` pictures of 12 families in colour, 16x16 pixels: label = family. Row i depends on (seed, i) alone.

    A family has its own shape and mostly its own colours; place, size, colour and noise vary.
    """

    forms = ("shapes:NUMBER",)
    about = "NUMBER pictures of 12 families of shapes, 16 x 16, in colour"

    count: int
    seed: int = 0

    def list(self) -> Listing:
        """Units of 4096 rows."""
        starts = range(0, self.count, UNIT_ROWS)
        row_bytes = SIDE * SIDE * 3
        units = tuple(Unit(f"{start:08d}", min(UNIT_ROWS, self.count - start) * row_bytes) for start in starts)
        return Listing(units, rows=self.count)

    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[EncodedChunk]:
        """See Source."""
        start = int(unit.key)
        indices = range(start, min(start + UNIT_ROWS, self.count))
        rows = ((self._row(index), (place + 1) / len(indices)) for place, index in enumerate(indices))
        return chunked(rows, self.chunk_rows, skip)

    def _row(self, index: int) -> Encoded:
        pixels_HWC, family = draw(self.seed, index)
        condition = f"a picture of {FAMILIES[family]}" if self.conditions.captions else family
        return self.encoded(f"shapes/{index:08d}", pixels_HWC, condition)


def draw(seed: int, index: int) -> tuple[np.ndarray, int]:
    """Draw a shape: pixels_HWC uint8, and its family 0..11."""
    generator = stream(seed, index)
    family = int(generator.integers(len(FAMILIES)))
    x, y, size, phase, hue, light, *_ = generator.random(6)
    noise_HWC = generator.normal(0.0, 10.0, (SIDE, SIDE, 3))
    mask_HW = _mask(family, 7.5 + 3 * (x - 0.5), 7.5 + 3 * (y - 0.5), 4.5 + 1.5 * size, int(phase * 2))
    # Families next to each other in the list are often alike in shape, so they get very different colours.
    turn = (5 * family % len(FAMILIES)) / len(FAMILIES) + 0.04 * (hue - 0.5)
    angle = 2 * np.pi * (turn + np.arange(3) / 3)
    ink_C = 128 + 110 * np.cos(angle)
    paper_C = 100 + 20 * light + 75 * np.cos(angle + 1.5)
    pixels_HWC = np.where(mask_HW[..., None], ink_C, paper_C) + noise_HWC
    return np.rint(pixels_HWC).clip(0, 255).astype(np.uint8), family


_Y_HW, _X_HW = np.mgrid[:SIDE, :SIDE]


def _mask(family: int, x: float, y: float, size: float, phase: int) -> np.ndarray:
    """mask_HW bool of a family's shape, from its centre, half its extent, and the shift of repeating patterns."""
    dx_HW, dy_HW = _X_HW - x, _Y_HW - y
    far_HW = np.maximum(abs(dx_HW), abs(dy_HW))
    inside_HW = far_HW <= size
    match FAMILIES[family]:
        case "disk":
            return np.hypot(dx_HW, dy_HW) <= size
        case "ring":
            return abs(np.hypot(dx_HW, dy_HW) - size) <= 1.2
        case "square":
            return inside_HW
        case "frame":
            return abs(far_HW - size) <= 1.0
        case "triangle":
            return inside_HW & (abs(dx_HW) <= (dy_HW + size) / 2)
        case "cross":
            return inside_HW & (np.minimum(abs(dx_HW), abs(dy_HW)) <= 1.2)
        case "saltire":
            return inside_HW & (abs(abs(dx_HW) - abs(dy_HW)) <= 1.2)
        case "rows":
            return (_Y_HW + phase) % 8 < 4
        case "columns":
            return (_X_HW + phase) % 8 < 4
        case "diagonals":
            return (_X_HW + _Y_HW + phase) % 8 < 4
        case "checkers":
            return ((_X_HW + phase) // 4 + _Y_HW // 4) % 2 == 0
        case _:
            return ((_X_HW + phase) % 8 < 4) & ((_Y_HW + phase) % 8 < 4)
