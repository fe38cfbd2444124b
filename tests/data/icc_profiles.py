"""ICC profiles made here: of RGB with other primaries or another curve, of grey, and of inks."""

import struct
from collections.abc import Sequence
from itertools import product

import numpy as np

# CIE xy of red, green and blue, by SMPTE EG 432-1 and by Adobe RGB (1998); both have the white of D65.
DISPLAY_P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
ADOBE_RGB = ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06))
SRGB = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
D65, D50 = np.array([0.95047, 1.0, 1.08883]), np.array([0.9642, 1.0, 0.8249])
# Bradford's cone responses, by which profiles adapt their white to D50.
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


def xyz_of(primaries: Sequence[tuple[float, float]]) -> np.ndarray:
    """Matrix (3, 3) from linear RGB with the white D65 to XYZ."""
    columns = np.array([[x / y, 1.0, (1 - x - y) / y] for x, y in primaries]).T
    return columns * np.linalg.solve(columns, D65)


def linear(levels: np.ndarray) -> np.ndarray:
    """Light, in [0, 1], of levels of sRGB, 0 to 255, by IEC 61966-2-1."""
    share = levels / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def rgb(primaries: Sequence[tuple[float, float]] = SRGB, gamma: float = 2.2) -> bytes:
    """A profile of RGB with these primaries and a gamma curve."""
    adapt = np.linalg.inv(BRADFORD) @ np.diag((BRADFORD @ D50) / (BRADFORD @ D65)) @ BRADFORD
    columns = (adapt @ xyz_of(primaries)).T
    tags = {f"{name}XYZ": _xyz(column) for name, column in zip("rgb", columns, strict=True)}
    return _profile("RGB ", tags | {f"{name}TRC": _gamma(gamma) for name in "rgb"})


def grey(gamma: float = 1.8) -> bytes:
    """A profile of grey with a gamma curve."""
    return _profile("GRAY", {"kTRC": _gamma(gamma)})


def inks() -> bytes:
    """A profile of CMYK by which paper is a light yellow, and each ink takes a third of its light."""
    grid = []
    for cyan, magenta, yellow, black in product((0, 1), repeat=4):
        bright = (1 - black) * (3 - cyan - magenta - yellow) / 3
        lab = np.array([90.0, -2.0, 30.0]) * bright
        grid += [lab[0] / 100 * 0xFF00, (lab[1] + 128) * 256, (lab[2] + 128) * 256]
    table = struct.pack(">4s4x4B", b"mft2", 4, 3, 2, 0) + struct.pack(">9i", *(65536 * (n % 4 == 0) for n in range(9)))
    table += struct.pack(">2H", 2, 2) + 4 * struct.pack(">2H", 0, 65535)
    table += b"".join(struct.pack(">H", round(min(65535, value))) for value in grid) + 3 * struct.pack(">2H", 0, 65535)
    return _profile("CMYK", {"A2B0": table}, connection="Lab ", kind="prtr")


def _xyz(values: np.ndarray) -> bytes:
    return struct.pack(">4s4x3i", b"XYZ ", *(round(value * 65536) for value in values))


def _gamma(gamma: float) -> bytes:
    return struct.pack(">4s4xIH2x", b"curv", 1, round(gamma * 256))


def _profile(space: str, tags: dict[str, bytes], connection: str = "XYZ ", kind: str = "mntr") -> bytes:
    text = b"test\0"
    tags = {
        "desc": struct.pack(">4s4xI", b"desc", len(text)) + text + bytes(78),
        "cprt": b"text" + bytes(4) + text,
        "wtpt": _xyz(D50),
        **tags,
    }
    place, table, data = 128 + 4 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, content in tags.items():
        content += bytes(-len(content) % 4)
        table += struct.pack(">4s2I", name.encode(), place + len(data), len(content))
        data += content
    size = place + len(data)
    head = struct.pack(
        ">I4xI4s4s4s12x4s", size, 0x02400000, kind.encode(), space.encode(), connection.encode(), b"acsp"
    )
    head += bytes(28) + struct.pack(">3i", *(round(value * 65536) for value in D50)) + bytes(48)
    assert len(head) == 128
    return head + table + data
