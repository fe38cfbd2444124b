"""Decode images to pixels and encode pixels; one-line reasons for files that can't be decoded. H, W, C channels."""

import io
import math
import re
import struct
import zlib
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import get_args

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from ddm_ray.core.names import FitName
from ddm_ray.data.profiles import NO_PROFILE, in_srgb, profile_of_jp2, unread_colours
from ddm_ray.pictures.png import to_png
from ddm_ray.plain_text import LFS_POINTER, NOT_FETCHED
from ddm_ray.spelling import one_line

# Recognised by content, whatever the file's name. A subset of Pillow's: one of its plug-ins starts another program.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
# File names of images in a source: all extensions that Pillow has for these formats.
EXTENSIONS = (
    frozenset({"jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "gif", "bmp", "tif", "tiff", "avif", "avifs"})
    | frozenset({"ppm", "pgm", "pbm", "pnm", "pfm"})
    | frozenset({"jp2", "j2k", "j2c", "jpc", "jpf", "jpx"})
)
MODES = {1: "L", 3: "RGB"}
FITS: tuple[FitName, ...] = get_args(FitName)
"""Ways to make an image of other proportions fit."""
MAX_PIXELS = 89_478_485
"""Maximum pixels of an image: the limit above which Pillow warns of a decompression bomb."""
DIM = "it has 16 bits and no value above 4095, so it is nearly black; if its values have 12 bits, multiply them by 16"
UNTURNED = "its XMP, or its EXIF as a text, can't be read, so it isn't turned as that may say"
CLEAR = "its transparent colour has 16 bits, of which the last 8 aren't compared"
HEIC = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"heif", b"mif1", b"msf1"})  # brands of files
DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    # Some of Pillow's plug-ins raise these for damaged headers.
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
)

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = {5, 6, 7, 8}
_MAX_LETTERS = 200
_PNG = b"\x89PNG\r\n\x1a\n"
_COLOURS = frozenset({b"iCCP", b"cICP", b"gAMA", b"cHRM"})
_MEANT = frozenset({b"tRNS", b"eXIf"})
_SHOWN = _MEANT | {b"XML:com.adobe.xmp", b"Raw profile type exif"}
"""Types of a PNG's chunks, and names of its texts: on its colours; those without which it is refused; on its shape."""
# Images of more than _LARGE pixels are converted and shrunk in bands of _BAND pixels.
_LARGE, _BAND = 2**24, 2**21


def decode(
    encoded: bytes | None, shape: tuple[int, int, int], fit: FitName = "crop", remarks: list[str] | None = None
) -> np.ndarray:
    """Decode the first frame, upright, in sRGB and over white, and resize it: pixels_HWC uint8 of `shape` (C, H, W).

    `fit`: keep the centre of an image of other proportions (crop), all of it between black bars (pad), or all of it
    distorted. An image that already has the size keeps its pixels. A JPEG, or an image of more than 2^24 pixels, is
    first shrunk to no less than twice the size. What the image loses is appended to `remarks`. Raises one of
    DECODER_ERRORS, also for a file that ends early, and for more than MAX_PIXELS; `rejection` turns it into a line.
    """
    encoded, remarks = encoded or b"", [] if remarks is None else remarks
    try:
        return _decoded(encoded, shape, fit, remarks)
    except DECODER_ERRORS as error:
        if not encoded.startswith(_PNG):
            raise
        return _decoded_alone(encoded, shape, fit, remarks, error)


def open_image(encoded: bytes) -> Image.Image:
    """An image of which the header is read. Raises one of DECODER_ERRORS."""
    if not encoded:
        raise ValueError("empty file")
    if encoded.startswith(LFS_POINTER):
        raise ValueError(NOT_FETCHED)
    try:
        return Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:
        raise UnidentifiedImageError(_unknown(encoded[:32])) from None


def _unknown(start: bytes) -> str:
    """Why a file that begins so isn't read."""
    if start[4:8] == b"ftyp" and start[8:12] in HEIC and b"avif" not in start:
        return "HEIC, or HEIF, whatever its name; convert it to JPEG or PNG"
    if start.startswith((b"\xff\x0a", b"\0\0\0\x0cJXL ")):
        return "JPEG XL, whatever its name; convert it to JPEG or PNG"
    for form in FORMATS:
        if (accepts := Image.OPEN[form][1]) and accepts(start[:16]) is True:
            return f"{form} that ends early, is damaged, or is of a kind that isn't read"
    return "not an image of a known format"


def _decoded_alone(
    encoded: bytes, shape: tuple[int, int, int], fit: FitName, remarks: list[str], error: Exception
) -> np.ndarray:
    """Decode a PNG without the texts and other chunks that aren't needed, one of which may be why it gave an error.

    A text of more than a megabyte is refused by Pillow, as is a chunk with a wrong checksum. Raises that error if it
    wasn't one of these, and ValueError for damaged transparency or EXIF.
    """
    for needed in (_SHOWN | _COLOURS, _SHOWN, _MEANT | _COLOURS, _MEANT):
        alone, dropped = _with_chunks(encoded, needed)
        if lost := dropped & _MEANT:
            raise ValueError(f"damaged {min(lost).decode()}, which says how to show it") from error
        with suppress(*DECODER_ERRORS):
            pixels_HWC = _decoded(alone, shape, fit, remarks)
            remarks += [NO_PROFILE] * bool(dropped & _COLOURS) + [UNTURNED] * bool(dropped - _COLOURS)
            return pixels_HWC
    raise error


def _with_chunks(encoded: bytes, needed: Collection[bytes]) -> tuple[bytes, set[bytes]]:
    """A PNG with its critical chunks and the `needed` ones with a right checksum, and what is dropped that matters."""
    kept, dropped, place = [_PNG], set[bytes](), len(_PNG)
    while place + 12 <= len(encoded):
        end = place + 12 + int.from_bytes(encoded[place : place + 4], "big")
        chunk = encoded[place:end]
        kind = chunk[4:8] if chunk[4:8] not in (b"tEXt", b"zTXt", b"iTXt") else chunk[8:88].partition(b"\0")[0]
        sound = chunk[-4:] == zlib.crc32(chunk[4:-4]).to_bytes(4, "big")
        if chunk[4:5].isupper() or (kind in needed and sound):
            kept.append(chunk)
        elif kind in _SHOWN | _COLOURS:
            dropped.add(kind)
        place = end
    return b"".join(kept), dropped


def _decoded(encoded: bytes, shape: tuple[int, int, int], fit: FitName, remarks: list[str]) -> np.ndarray:
    num_channels, height, width = shape
    mode = MODES[num_channels]
    with open_image(encoded) as opened:
        if opened.width * opened.height > MAX_PIXELS:
            raise Image.DecompressionBombError(f"{opened.width} x {opened.height} pixels are more than {MAX_PIXELS}")
        extent: Sequence[float] | None = None  # the exact size, if it isn't the number of pixels
        if isinstance(opened, JpegImageFile):
            drafted = opened.draft(None, (2 * max(width, height),) * 2)
            extent = drafted[1][2:] if drafted and drafted[1][2:] != opened.size else None
        opened.load()
        if opened.format == "JPEG2000":
            opened.info.setdefault("icc_profile", profile_of_jp2(encoded))
        with suppress(*DECODER_ERRORS):  # of damaged EXIF
            remarks += filter(None, [unread_colours(opened, encoded)])
        levels = _levels(opened)
        if levels == (0, 65535) and _is_dim(opened):
            remarks.append(DIM)
        remarks += filter(None, [_scale_clear(opened, encoded)])
        turn = _orientation(opened)
        size = (height, width) if turn in _SIDEWAYS else (width, height)
        if opened.width * opened.height > _LARGE:
            image = _shrunk(opened, extent or opened.size, mode, size, fit, levels, remarks)
        else:
            image = _plain(opened, mode, levels, remarks)
            if extent:
                image = image.resize(_inner(extent, size, fit), Image.Resampling.BICUBIC, _box(extent, size, fit))
    image = image.transpose(_UPRIGHT[turn]) if turn in _UPRIGHT else image
    size = (width, height)
    if fit == "crop" and image.size != size:
        image = ImageOps.fit(image, size, Image.Resampling.BICUBIC)
    elif image.size != (inner := _inner(image.size, size, fit)):
        image = image.resize(inner, Image.Resampling.BICUBIC)
    if image.size != size:
        bars = Image.new(mode, size)
        bars.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
        image = bars
    return np.asarray(image, np.uint8).reshape(height, width, num_channels)


def rejection(error: BaseException) -> str:
    """One line on why an image can't be used; the same error gives the same line."""
    text = one_line(re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "the file", str(error)))
    text = text.encode("utf-8", "backslashreplace").decode()
    return f"{type(error).__name__}: {text[:_MAX_LETTERS]}".removesuffix(": ")


def thumbnail(pixels_HWC: np.ndarray, side: int = 64) -> bytes:
    """A JPEG of at most `side` pixels along each side; smaller images keep their size."""
    image = _image(pixels_HWC)
    image.thumbnail((side, side), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=85)
    return buffer.getvalue()


def png(pixels: np.ndarray, compression: int = 6) -> bytes:
    """An image uint8, (H, W), (H, W, 1) or (H, W, 3), as a PNG file; compression 0 to 9."""
    return to_png(_image(pixels), compression)


def _image(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)


def _centre(extent: Sequence[float], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest box in the middle of an image of this width and height that has the proportions of `size`."""
    scale = min(length / side for length, side in zip(extent, size, strict=True))
    margins = [max(0.0, length - scale * side) / 2 for length, side in zip(extent, size, strict=True)]
    return margins[0], margins[1], extent[0] - margins[0], extent[1] - margins[1]


def _box(extent: Sequence[float], size: tuple[int, int], fit: FitName) -> tuple[float, float, float, float]:
    """The part that is shown of an image of this width and height."""
    return _centre(extent, size) if fit == "crop" else (0.0, 0.0, extent[0], extent[1])


def _inner(extent: Sequence[float], size: tuple[int, int], fit: FitName) -> tuple[int, int]:
    """The size to which the shown part is resized, without bars."""
    if fit != "pad":
        return size
    scale = min(side / length for length, side in zip(extent, size, strict=True))
    width, height = (max(1, round(scale * length)) for length in extent)
    return width, height


def _shrunk(
    image: Image.Image,
    extent: Sequence[float],
    mode: str,
    size: tuple[int, int],
    fit: FitName,
    levels: tuple[int, int] | None,
    remarks: list[str],
) -> Image.Image:
    """The shown part of a large loaded image, in mode L or RGB, resized. `extent`: the image's exact size.

    Only one band of its pixels is converted at a time, and averaged down to no less than twice the size.
    """
    (left, top, right, bottom), inner = _box(extent, size, fit), _inner(extent, size, fit)
    factor = max(1, int(min((right - left) / inner[0], (bottom - top) / inner[1]) / 2))
    x, y, end_x, end_y = int(left), int(top), math.ceil(right), math.ceil(bottom)
    reduced = Image.new(mode, (-(-(end_x - x) // factor), -(-(end_y - y) // factor)))
    rows = factor * max(1, _BAND // (factor * (end_x - x)))
    for start in range(y, end_y, rows):
        of_band: list[str] = []
        band = _plain(image.crop((x, start, end_x, min(start + rows, end_y))), mode, levels, of_band)
        remarks += [remark for remark in of_band if remark not in remarks]  # each band says the same
        reduced.paste(band.reduce(factor), (0, (start - y) // factor))
    box = ((left - x) / factor, (top - y) / factor, (right - x) / factor, (bottom - y) / factor)
    return reduced.resize(inner, Image.Resampling.BICUBIC, box)


def _plain(image: Image.Image, mode: str, levels: tuple[int, int] | None, remarks: list[str]) -> Image.Image:
    """A loaded image, or a part of one, in sRGB and in mode L or RGB. `levels`: see `_levels`."""
    if levels:
        # Pillow's own conversion to 8 bits clips instead of scaling.
        values, (black, white) = np.asarray(image), levels
        scaled = np.rint((values.astype(np.float32) - black) / ((white - black) / 255)).clip(0, 255)
        info, image = image.info.copy(), Image.fromarray(scaled.astype(np.uint8))
        if isinstance(clear := info.pop("transparency", None), int):
            image.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
        image.info = info
    if image.mode in ("I", "F"):
        raise ValueError(f"mode {image.mode}: 32-bit values have no range that is white and black for all files")
    image, remark = in_srgb(image)
    if remark:
        remarks.append(remark)
    if image.has_transparency_data:
        coloured = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), coloured).convert(mode)
    return image.convert(mode)


def _levels(image: Image.Image) -> tuple[int, int] | None:
    """The values that are black and white in a loaded image of more than 8 bits; None for others."""
    if not image.mode.startswith("I;16") and (image.mode != "I" or image.format not in ("PNG", "PPM")):
        return None
    tags = getattr(image, "tag_v2", {})
    most = 2 ** tags.get(ExifTags.Base.BitsPerSample, (16,))[0] - 1
    return (most, 0) if tags.get(ExifTags.Base.PhotometricInterpretation) == 0 else (0, most)


def _is_dim(image: Image.Image) -> bool:
    """True if no value of a loaded image of 16 bits has more than 12."""
    rows = max(1, _BAND // image.width)
    bands = (image.crop((0, y, image.width, min(y + rows, image.height))) for y in range(0, image.height, rows))
    return all(np.asarray(band).max() < 2**12 for band in bands)


def _scale_clear(image: Image.Image, encoded: bytes) -> str:
    """Give a PNG's transparent colour the levels of the loaded pixels. A remark if that loses something, else ""."""
    clear = image.info.get("transparency")
    bits = encoded[24] if image.format == "PNG" else 8
    if bits < 8 and image.mode == "L" and isinstance(clear, int):
        most = 2**bits - 1
        image.info["transparency"] = (clear & most) * 255 // most
    elif bits > 8 and isinstance(clear, tuple):
        image.info["transparency"] = tuple(level >> 8 for level in clear)
        return CLEAR
    return ""


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except DECODER_ERRORS:
        return 1  # the EXIF block is damaged, but the pixels are whole
    return orientation if isinstance(orientation, int) else 1
