"""A sound picture is read whatever its metadata are: these are dropped, and the pixels are the same."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from ddm_ray.data.images import decode
from ddm_ray.data.profiles import NO_PROFILE
from tests.data.icc_profiles import DISPLAY_P3, rgb

SHAPE = (3, 16, 16)
PIXELS = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)


def png(**settings: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, "PNG", **settings)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes, checksum: int | None = None) -> bytes:
    checksum = zlib.crc32(kind + data) if checksum is None else checksum
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


def with_chunk(added: bytes, before: bytes = b"IDAT") -> bytes:
    """A PNG with one more chunk."""
    content = png()
    place = content.index(before) - 4
    return content[:place] + added + content[place:]


def workflow(megabytes: int) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_text("workflow", "x" * (megabytes << 20), zip=True)
    info.add_itxt("prompt", "y" * (megabytes << 20), zip=True)
    return info


ODD = {
    "texts of megabytes": png(pnginfo=workflow(2)),
    "texts after the pixels": with_chunk(chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2 << 20))), b"IEND"),
    "a text that isn't compressed": with_chunk(chunk(b"zTXt", b"k\0\0none")),
    "a text with a wrong checksum": with_chunk(chunk(b"tEXt", b"k\0text", checksum=7)),
    "a profile of megabytes": with_chunk(chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(2 << 20)))),
    "a profile that isn't compressed": with_chunk(chunk(b"iCCP", b"k\0\0none")),
    "EXIF that is cut off": with_chunk(chunk(b"eXIf", b"MM\0*\0\0")),
    "an unknown chunk": with_chunk(chunk(b"teST", b"\xff" * 9)),
    "a resolution of no length": with_chunk(chunk(b"pHYs", b"")),
    "a colour space of no length": with_chunk(chunk(b"cHRM", b"")),
    "a gamma of no length": with_chunk(chunk(b"gAMA", b"")),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_png_is_read_without_what_is_odd(kind: str) -> None:
    assert (decode(ODD[kind], SHAPE) == PIXELS).all()


def test_transparency_stays_when_a_text_goes() -> None:
    clear = Image.new("P", (16, 16))
    buffer = io.BytesIO()
    clear.save(buffer, "PNG", transparency=0, pnginfo=workflow(2))
    assert (decode(buffer.getvalue(), SHAPE) == 255).all()


@pytest.mark.parametrize("key", ["XML:com.adobe.xmp", "Raw profile type exif"])
def test_an_orientation_stays_when_another_text_goes(key: str) -> None:
    info, exif = workflow(2), Image.Exif()
    exif[0x0112] = 3
    if key.startswith("XML"):
        info.add_itxt(key, '<x:xmpmeta xmlns:x="adobe:ns:meta/" tiff:Orientation="3"/>')
    else:
        info.add_text(key, f"\nexif\n{len(exif.tobytes()):8}\n{exif.tobytes().hex()}\n", zip=True)
    assert (decode(png(pnginfo=info), SHAPE) == PIXELS[::-1, ::-1]).all()


def damaged(content: bytes, kind: bytes) -> bytes:
    """A PNG with a wrong checksum of one chunk."""
    place = content.index(kind)
    end = place + 4 + int.from_bytes(content[place - 4 : place], "big")
    return content[:end] + bytes([content[end] ^ 255]) + content[end + 1 :]


def test_a_png_that_cannot_be_shown_as_it_was_meant_is_refused() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind, settings in {b"tRNS": {"transparency": (1, 2, 3)}, b"eXIf": {"exif": exif}}.items():
        with pytest.raises(ValueError, match=f"damaged {kind.decode()}, which says how to show it"):
            decode(damaged(png(**settings), kind), SHAPE)


def test_a_damaged_profile_is_said() -> None:
    remarks: list[str] = []
    content = damaged(png(icc_profile=rgb(DISPLAY_P3)), b"iCCP")
    assert (decode(content, SHAPE, remarks=remarks) == PIXELS).all() and remarks == [NO_PROFILE]


def test_damaged_pixels_are_refused_all_the_same() -> None:
    content = bytearray(png(pnginfo=workflow(2)))
    place = content.rindex(b"IDAT")
    content[place + 20] ^= 255
    with pytest.raises((SyntaxError, OSError, ValueError)):
        decode(bytes(content), SHAPE)


JPEG = {
    "EXIF that is none": b"Exif\0\0garbage",
    "EXIF that is cut off": b"Exif\0\0MM\0*\0\0\0\x08\0\xff",
    "a part of a profile": b"ICC_PROFILE\0\x02\x03half",
    "Photoshop's that is cut off": b"Photoshop 3.0\x008BIM\x04",
    "XMP that is no XML": b"http://ns.adobe.com/xap/1.0/\0<x",
}


@pytest.mark.parametrize("kind", JPEG)
@pytest.mark.parametrize("marker", [0xE1, 0xE2, 0xED])
def test_a_jpeg_is_read_without_what_is_odd(kind: str, marker: int) -> None:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, "JPEG", quality=100)
    plain, data = buffer.getvalue(), JPEG[kind]
    odd = plain[:2] + struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data + plain[2:]
    assert (decode(odd, SHAPE) == decode(plain, SHAPE)).all()
