"""A folder of images as they come: many formats and modes, and some that are broken, each in its own way."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("apples", "boats", "clouds", "doors")
NUM_BROKEN = 50
ORIENTATION = 0x0112


def write_images(folder: Path, good: int = 2000, seed: int = 0) -> tuple[set[str], dict[str, str]]:
    """Write `good` images that decode and 50 that don't, in four class folders.

    The ids (paths below the folder) of the good ones, and the kind of damage by id of the broken ones.
    """
    generator = np.random.default_rng(seed)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    sound = set()
    for index in range(good):
        kind = list(GOOD)[index % len(GOOD)]
        path = f"{CLASSES[index // len(GOOD) % len(CLASSES)]}/{index:05d}-{kind}"
        (folder / path).write_bytes(GOOD[kind](picture(generator)))
        sound.add(path)
    broken = {}
    for index in range(NUM_BROKEN):
        kind = list(BROKEN)[index % len(BROKEN)]
        path = f"{CLASSES[index % len(CLASSES)]}/broken-{index:02d}-{kind.replace(' ', '-')}{SUFFIX[kind]}"
        (folder / path).write_bytes(BROKEN[kind](picture(generator)))
        broken[path] = kind
    return sound, broken


def picture(generator: np.random.Generator, width: int = 20, height: int = 20) -> Image.Image:
    """Coloured noise in mode RGB."""
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    """An image as a file's bytes."""
    buffer = io.BytesIO()
    image.save(buffer, format=form, **options)
    return buffer.getvalue()


def sixteen_bit(image: Image.Image) -> bytes:
    """The grey image with each value v as 257 v, in a PNG of 16 bits."""
    return encoded(Image.fromarray(np.asarray(image.convert("L"), np.uint16) * 257), "PNG")


def palette_with_alpha(image: Image.Image) -> bytes:
    """16 colours, of which that of the first pixel is see-through."""
    reduced = image.quantize(16)
    return encoded(reduced, "PNG", transparency=reduced.getpixel((0, 0)))


def translucent(image: Image.Image, mode: str) -> Image.Image:
    """With an alpha channel that falls from left to right."""
    alpha = Image.linear_gradient("L").rotate(90).resize(image.size)
    image = image.convert(mode[:-1])
    image.putalpha(alpha)
    return image


def rotated(image: Image.Image, orientation: int = 6) -> bytes:
    """A JPEG that its EXIF block says to turn."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(image, "JPEG", exif=exif)


def header_only(width: int, height: int) -> bytes:
    """A PNG that claims to be of this size and has hardly any data."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(64))), (b"IEND", b""))
    body = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    """Every byte of its second half inverted."""
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 0xFF for byte in content[middle:])


GOOD: dict[str, Callable[[Image.Image], bytes]] = {
    "plain.jpg": lambda image: encoded(image, "JPEG"),
    "plain.png": lambda image: encoded(image, "PNG"),
    "plain.webp": lambda image: encoded(image, "WEBP", quality=50),
    "plain.gif": lambda image: encoded(image, "GIF"),
    "plain.bmp": lambda image: encoded(image, "BMP"),
    "plain.tiff": lambda image: encoded(image, "TIFF"),
    "plain.ppm": lambda image: encoded(image, "PPM"),
    "cmyk.jpeg": lambda image: encoded(image.convert("CMYK"), "JPEG"),
    "sixteen-bit.png": sixteen_bit,
    "animated.gif": lambda image: encoded(
        image, "GIF", save_all=True, append_images=[image.transpose(Image.Transpose.ROTATE_90)]
    ),
    "palette-alpha.png": palette_with_alpha,
    "grey-alpha.png": lambda image: encoded(translucent(image, "LA"), "PNG"),
    "colour-alpha.webp": lambda image: encoded(translucent(image, "RGBA"), "WEBP", quality=50),
    "one-bit.png": lambda image: encoded(image.convert("1"), "PNG"),
    "grey.JPG": lambda image: encoded(image.convert("L"), "JPEG"),
    "rotated.jpg": rotated,
    "tall.png": lambda image: encoded(image.resize((9, 60)), "PNG"),
    "wide.tif": lambda image: encoded(image.resize((70, 8)), "TIFF"),
    "really-a-png.jpg": lambda image: encoded(image, "PNG"),
}
BROKEN: dict[str, Callable[[Image.Image], bytes]] = {
    "cut jpeg": lambda image: half(encoded(image.resize((200, 200)), "JPEG")),
    "cut png": lambda image: half(encoded(image, "PNG")),
    "cut webp": lambda image: half(encoded(image, "WEBP")),
    "cut bmp": lambda image: half(encoded(image, "BMP")),
    "empty": lambda image: b"",
    "text": lambda image: b"This is not a picture.\n",
    "web page": lambda image: b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "huge header": lambda image: header_only(50_000, 50_000),
    "flipped png": lambda image: flipped(encoded(image, "PNG")),
    "no data": lambda image: header_only(64, 64),
    "garbage gif": lambda image: b"GIF89a" + bytes(range(200, 256)),
    "float tiff": lambda image: encoded(image.convert("F"), "TIFF"),
    "just a header": lambda image: encoded(image, "JPEG")[:20],
}
SUFFIX = dict.fromkeys(BROKEN, ".jpg") | {
    "cut png": ".png",
    "cut webp": ".webp",
    "cut bmp": ".bmp",
    "web page": ".png",
    "huge header": ".png",
    "flipped png": ".png",
    "no data": ".png",
    "garbage gif": ".gif",
    "float tiff": ".tif",
}
