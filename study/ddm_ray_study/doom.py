"""Pictures in Doom's archives (WAD files): sprites, patches of walls, and flats of floors.

The format is described in "The Unofficial Doom Specs" by Matthew Fell (1994), chapters 2, 5 and 6.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

FLAT_SIDE, TILE_SIDE = 64, 64
_ENTRY = struct.Struct("<ii8s")
_SECTIONS = {"S_START": "sprites", "P_START": "patches", "F_START": "flats"}
_ENDS = ("S_END", "P_END", "F_END")


def pictures(path: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield section, name, and pixels of a WAD's pictures.

    Pixels are uint8: (H, W, 4) of sprites and patches, whose holes have alpha 0; (64, 64, 3) of flats.
    """
    palette_NC, section = np.zeros((256, 3), np.uint8), ""
    for name, lump in _lumps(path):
        if name == "PLAYPAL":
            palette_NC = np.frombuffer(lump, np.uint8, 768).reshape(256, 3)
        elif name in _SECTIONS:
            section = _SECTIONS[name]
        elif name in _ENDS:
            section = ""
        elif section == "flats" and len(lump) == FLAT_SIDE * FLAT_SIDE:
            yield section, name, palette_NC[np.frombuffer(lump, np.uint8)].reshape(FLAT_SIDE, FLAT_SIDE, 3)
        elif section in ("sprites", "patches") and len(lump) > 8 and not lump.startswith(b"\x89PNG"):
            yield section, name, _columns(lump, palette_NC)


def tiles(pixels_HWC: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the 64x64 RGB tiles of a patch, from its top left, that have no holes."""
    height, width = (length // TILE_SIDE * TILE_SIDE for length in pixels_HWC.shape[:2])
    for top in range(0, height, TILE_SIDE):
        for left in range(0, width, TILE_SIDE):
            tile_HWC = pixels_HWC[top : top + TILE_SIDE, left : left + TILE_SIDE]
            if tile_HWC[..., 3].all():
                yield tile_HWC[..., :3]


def _lumps(path: Path) -> Iterator[tuple[str, bytes]]:
    archive = path.read_bytes()
    count, directory = struct.unpack_from("<ii", archive, 4)
    for entry in range(count):
        start, size, name = _ENTRY.unpack_from(archive, directory + _ENTRY.size * entry)
        yield name.split(b"\0")[0].decode("ascii", "replace"), archive[start : start + size]


def _columns(lump: bytes, palette_NC: np.ndarray) -> np.ndarray:
    """pixels_HWC uint8 with alpha: each column is a list of posts, runs of opaque pixels."""
    width, height = struct.unpack_from("<hh", lump)
    pixels_HWC = np.zeros((height, width, 4), np.uint8)
    for column, at in enumerate(struct.unpack_from(f"<{width}i", lump, 8)):
        while lump[at] != 255:
            top, length = lump[at], lump[at + 1]
            post_NC = palette_NC[np.frombuffer(lump, np.uint8, length, at + 3)][: max(0, height - top)]
            pixels_HWC[top : top + len(post_NC), column, :3] = post_NC
            pixels_HWC[top : top + len(post_NC), column, 3] = 255
            at += length + 4  # a byte before the pixels and one after are padding
    return pixels_HWC
