"""Makers of the files in `odd_files.py`."""

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin, TiffImagePlugin

from tests.data import icc_profiles

COLOUR, GREY = (190, 70, 40), 106
"""Of all pictures here: the luma of the colour is the grey."""
WHITE = (255, 255, 255)


@dataclass(frozen=True)
class OddFile:
    """A file by its name. `colour`: what it shows in sRGB over white, within `within` levels, if it is read."""

    name: str
    data: bytes
    colour: tuple[int, int, int] = COLOUR
    within: int = 4


def flat(mode: str) -> Image.Image:
    """A picture of one colour in this mode; its left half is transparent where the mode can say so."""
    if mode in ("I;16", "I"):
        return Image.fromarray(np.full((20, 24), GREY * 257, np.uint16 if mode == "I;16" else np.int32))
    if mode == "F":
        return Image.fromarray(np.full((20, 24), GREY / 255, np.float32))
    image = Image.new("RGB", (24, 20), COLOUR)
    return image.quantize(4) if mode == "P" else image.convert(mode)


def saved(image: Image.Image, form: str, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    usual: dict[str, Any] = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}.get(form, {})
    image.save(buffer, form, **{**usual, **settings})
    return buffer.getvalue()


MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P"),
    "BMP": ("1", "L", "P", "RGB"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"),
    "PPM": ("1", "L", "RGB"),
    "AVIF": ("RGB", "RGBA"),
    "JPEG2000": ("L", "LA", "RGB", "RGBA"),
}
ENDINGS = {"JPEG": "jpg", "PPM": "ppm", "JPEG2000": "jp2", "TIFF": "tif"}


def ending(form: str) -> str:
    return ENDINGS.get(form, form.lower())


def colour_of(mode: str) -> tuple[int, int, int]:
    """What a flat picture of this mode shows."""
    if mode == "1":  # dithered
        return (GREY,) * 3
    return (GREY,) * 3 if mode in ("L", "LA", "I;16") else COLOUR


def in_all_modes(form: str) -> Callable[[], Iterator[OddFile]]:
    def files() -> Iterator[OddFile]:
        for mode in MODES[form]:
            within = 40 if mode == "1" else 6
            yield OddFile(
                f"{form}-{mode.replace(';', '')}.{ending(form)}", saved(flat(mode), form), colour_of(mode), within
            )

    return files


def transparent() -> Iterator[OddFile]:
    clear = Image.new("RGBA", (24, 20), (0, 0, 0, 0))
    for form in ("PNG", "WEBP", "TIFF", "AVIF", "JPEG2000"):
        yield OddFile(f"clear-{form}.{ending(form)}", saved(clear, form), WHITE)
    yield OddFile("clear-P.png", saved(Image.new("P", (24, 20)), "PNG", transparency=0), WHITE)
    yield OddFile("clear-P.gif", saved(Image.new("P", (24, 20)), "GIF", transparency=0), WHITE)
    for bits in (2, 4, 16):
        yield OddFile(f"clear-L{bits}.png", raw_png(bits, 0, b"\x55", clear=0x5555 % 2**bits), WHITE)
    yield OddFile("alike-L16.png", raw_png(16, 0, bytes([GREY, GREY]), clear=GREY), (GREY,) * 3)
    yield OddFile("clear-RGB16.png", raw_png(16, 2, b"\x55", clear=0x5555), WHITE)
    yield OddFile("unlike-RGB16.png", raw_png(16, 2, bytes([GREY]), clear=0x5500 + GREY), (GREY,) * 3)


def raw_png(bits: int, kind: int, pattern: bytes, clear: int) -> bytes:
    """A PNG of 24 x 20 pixels of `bits`, all of this pattern; `kind` 0 is grey, 2 is RGB. `clear` is transparent."""
    channels = 1 + kind
    row = b"\0" + pattern * (24 * channels * bits // 8 // len(pattern))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 24, 20, bits, kind, 0, 0, 0))
    tail = chunk(b"IDAT", zlib.compress(row * 20)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"tRNS", struct.pack(">H", clear) * channels) + tail


def tiffs_of_many_bits() -> Iterator[OddFile]:
    """Big-endian ones, ones in which 0 is white, and ones of 12 bits."""
    values = np.full((20, 24), GREY * 257, np.uint16)
    plain = saved(Image.fromarray(values), "TIFF")
    twelve = plain.replace(struct.pack("<HHIH", 258, 3, 1, 16), struct.pack("<HHIH", 258, 3, 1, 12))
    twelve = twelve.replace(values.tobytes(), (b"\x6a\x66\xa6" * 240).ljust(960))
    assert twelve.count(b"\x6a\x66\xa6") == 240
    inverted = saved(Image.fromarray(65535 - values), "TIFF", tiffinfo={262: 0})
    files = {"big-endian": saved(Image.fromarray(values.astype(">u2")), "TIFF"), "white-is-0": inverted, "12": twelve}
    for name, data in files.items():
        yield OddFile(f"bits-{name}.tif", data, (GREY,) * 3, within=1)


def with_profiles() -> Iterator[OddFile]:
    """In their own primaries, the colour that is COLOUR in sRGB."""
    for name, primaries in (("p3", icc_profiles.DISPLAY_P3), ("adobe", icc_profiles.ADOBE_RGB)):
        linear = icc_profiles.linear(np.array(COLOUR)) @ icc_profiles.xyz_of(icc_profiles.SRGB).T
        own = (linear @ np.linalg.inv(icc_profiles.xyz_of(primaries)).T).clip(0, 1) ** (1 / 2.2)
        image = Image.new("RGB", (24, 20), tuple(int(level) for level in (255 * own).round()))
        for form in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
            data = saved(image, form, icc_profile=icc_profiles.rgb(primaries))
            yield OddFile(f"{name}-{form}.{ending(form)}", data, within=6)


def told_in_another_way() -> Iterator[OddFile]:
    info = PngImagePlugin.PngInfo()
    info.add(b"gAMA", struct.pack(">I", 100_000))
    yield OddFile("gamma.png", saved(flat("RGB"), "PNG", pnginfo=info))


def with_usual_profiles() -> Iterator[OddFile]:
    """sRGB's own, which changes nothing, in all modes that have one."""
    own = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for form in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
        for mode in MODES[form]:
            if mode not in ("1", "CMYK"):
                data, name = saved(flat(mode), form, icc_profile=own), f"srgb-{form}-{mode.replace(';', '')}"
                yield OddFile(f"{name}.{ending(form)}", data, colour_of(mode), within=6)


def dim() -> Iterator[OddFile]:
    image = Image.fromarray(np.full((20, 24), 4095, np.uint16))
    return (OddFile(f"dim.{ending(form)}", saved(image, form), (16, 16, 16)) for form in ("PNG", "TIFF"))


def turned() -> Iterator[OddFile]:
    for form in ("JPEG", "PNG", "WEBP", "TIFF"):
        for mode in set(MODES[form]) - {"1", "I;16"}:
            for orientation in range(1, 9):
                exif = Image.Exif()
                exif[0x0112] = orientation
                data, name = saved(flat(mode), form, exif=exif.tobytes()), f"turned-{orientation}-{form}-{mode}"
                yield OddFile(f"{name}.{ending(form)}", data, colour_of(mode), within=6)


def moving() -> Iterator[OddFile]:
    others = [Image.new("RGB", (24, 20), WHITE)] * 2
    for form in ("GIF", "PNG", "WEBP", "TIFF"):
        data = saved(flat("RGB"), form, save_all=True, append_images=others)
        yield OddFile(f"moving-{form}.{ending(form)}", data, within=6)


def chunk(kind: bytes, data: bytes, checksum: int | None = None) -> bytes:
    checksum = zlib.crc32(kind + data) if checksum is None else checksum
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


def odd_metadata() -> Iterator[OddFile]:
    text = PngImagePlugin.PngInfo()
    text.add_text("workflow", "x" * (2 << 20), zip=True)
    yield OddFile("workflow.png", saved(flat("RGB"), "PNG", pnginfo=text))
    plain = saved(flat("RGB"), "PNG")
    place = plain.index(b"IDAT") - 4
    odd = {
        "text": chunk(b"zTXt", b"k\0\0none"),
        "checksum": chunk(b"tEXt", b"k\0text", checksum=7),
        "exif": chunk(b"eXIf", b"MM\0*\0\0"),
        "profile": chunk(b"iCCP", b"k\0\0none"),
        "resolution": chunk(b"pHYs", b""),
        "unknown": chunk(b"teST", bytes(9)),
    }
    for keyword in (b"XML:com.adobe.xmp", b"Raw profile type exif"):
        long = keyword + b"\0\0" + zlib.compress(bytes(2 << 20))
        odd[f"long {keyword.decode()}"] = chunk(b"zTXt", long)
        odd[f"checksum of {keyword.decode()}"] = chunk(b"zTXt", long, checksum=7)
    for name, added in odd.items():
        yield OddFile(f"odd-{name}.png", plain[:place] + added + plain[place:])
    jpeg = saved(flat("RGB"), "JPEG")
    for name, data in {
        "exif": b"Exif\0\0garbage",
        "profile": b"ICC_PROFILE\0\1\2",
        "xmp": b"http://ns.adobe.com/xap/1.0/\0<",
    }.items():
        segment = struct.pack(">BBH", 0xFF, 0xE2 if name == "profile" else 0xE1, len(data) + 2) + data
        yield OddFile(f"odd-{name}.jpg", jpeg[:2] + segment + jpeg[2:])
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[37510] = "x" * 5000
    yield OddFile("odd-tags.tif", saved(flat("RGB"), "TIFF", tiffinfo=tags))


def named() -> Iterator[OddFile]:
    data = saved(flat("RGB"), "JPEG")
    names = ["with a space", "a#b", "a'b", 'a"b', "a;b", "-dash", "a.b.c", "café", "cafe\u0301", "日本語", "🦀"]
    names += ["%20", "a&b", "$HOME", "[x]", "a*b"]
    names += ["n" * 200, "tab\there", "back\\slash", "{000..127}", "a,b", "=", "~", "test", "train"]
    for name in names:
        yield OddFile(f"{name}.jpg", data)
    for suffix in ("JPG", "JPEG", "Jpg", "jpe", "jfif"):
        yield OddFile(f"upper.{suffix}", data)


def of_another_format() -> Iterator[OddFile]:
    for form in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"):
        for called in ("jpg", "png"):
            yield OddFile(f"really-{form}.{called}", saved(flat("RGB"), form), within=6)


def cut_short() -> Iterator[OddFile]:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8))
    for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"):
        data = saved(noise, form)
        for share in (0.3, 0.6):
            yield OddFile(f"cut-{share}-{form}.{ending(form)}", data[: int(share * len(data))])
    for way in ("tiff_lzw", "tiff_adobe_deflate", "jpeg"):
        data = saved(noise, "TIFF", compression=way)
        yield OddFile(f"cut-{way}.tif", data[: len(data) // 2])


def damaged_chunks() -> Iterator[OddFile]:
    """Chunks with a wrong checksum, without which the pixels mean something else."""
    plain = saved(flat("RGB"), "PNG")
    place = plain.index(b"IDAT") - 4
    for kind in (b"tRNS", b"eXIf"):
        yield OddFile(f"damaged-{kind.decode()}.png", plain[:place] + chunk(kind, bytes(6), checksum=7) + plain[place:])


def wide_values() -> Iterator[OddFile]:
    for mode in ("I", "F"):
        yield OddFile(f"wide-{mode}.tif", saved(flat(mode), "TIFF"))


def each(data: bytes, *names: str) -> Callable[[], Iterator[OddFile]]:
    return lambda: (OddFile(name, data) for name in names)


def bomb() -> bytes:
    """A PNG of 20,000 x 20,000 pixels in a few kilobytes."""
    rows = zlib.compress(bytes(20_001) * 10, 9)
    head = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
