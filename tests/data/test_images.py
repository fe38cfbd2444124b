import io
import re

import numpy as np
import pytest
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngInfo

from ddm_ray.data import images
from ddm_ray.data.images import DECODER_ERRORS, DIM, EXTENSIONS, MAX_PIXELS, decode, png, rejection, thumbnail
from tests.data.broken import (
    BROKEN,
    GOOD,
    encoded,
    header_only,
    palette_with_alpha,
    picture,
    rotated,
    sixteen_bit,
)

RGB = (3, 16, 16)
GREY = (1, 16, 16)
FORMATS = {"JPEG": {}, "PNG": {}, "WEBP": {}, "GIF": {}, "BMP": {}, "TIFF": {"compression": "tiff_lzw"}, "PPM": {}}


def flat(colour: tuple[int, ...], mode: str = "RGB", size: tuple[int, int] = (40, 40)) -> Image.Image:
    return Image.new(mode, size, colour)


def mean(encoded_image: bytes, shape: tuple[int, int, int] = RGB) -> list[float]:
    return decode(encoded_image, shape).reshape(-1, shape[0]).mean(axis=0).tolist()


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_of_the_right_size_are_untouched(channels):
    shape = (channels, 12, 12)
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (12, 12, channels), dtype=np.uint8)
    decoded = decode(png(pixels_HWC), shape)
    assert decoded.dtype == np.uint8
    assert (decoded == pixels_HWC).all()


def test_the_centre_is_cropped_and_resized():
    pixels = np.zeros((40, 120, 3), np.uint8)
    pixels[:, :40], pixels[:, 40:60], pixels[:, 60:80], pixels[:, 80:] = (255, 0, 0), (0, 255, 0), (0, 0, 255), 90
    wide = decode(png(pixels), (3, 8, 8))
    assert (wide[:, 1] == (0, 255, 0)).all()
    assert (wide[:, 6] == (0, 0, 255)).all()
    tall = decode(png(pixels.transpose(1, 0, 2)), (3, 8, 8))
    assert (tall == wide.transpose(1, 0, 2)).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("bands", [False, True])
def test_all_of_an_image_is_shown_between_bars_or_distorted(kind, bands, monkeypatch):
    """Also of one that its decoder shrinks, or that is shrunk in bands."""
    monkeypatch.setattr(images, "_LARGE", 1 if bands else images._LARGE)
    pixels = np.full((120, 240, 3), 200, np.uint8)
    pixels[:, :60], pixels[:, 180:] = (250, 0, 0), (0, 0, 250)
    wide, tall = (encoded(Image.fromarray(each), kind) for each in (pixels, pixels.transpose(1, 0, 2)))
    padded, squashed = decode(wide, (3, 16, 16), fit="pad").astype(int), decode(wide, (3, 16, 16), fit="squash")
    assert not padded[:4].any() and not padded[12:].any()
    for shown, rows in ((padded, slice(5, 11)), (squashed.astype(int), slice(16))):
        assert np.abs(shown[rows, :3] - (250, 0, 0)).max() < 12
        assert np.abs(shown[rows, 6:10] - 200).max() < 12
        assert np.abs(shown[rows, 13:] - (0, 0, 250)).max() < 12
    for fit, across in (("pad", padded), ("squash", squashed)):
        down = decode(tall, (3, 16, 16), fit=fit)
        assert np.abs(down.astype(int) - across.transpose(1, 0, 2)).max() < 12
    thin = decode(encoded(flat((9, 9, 9), size=(500, 2)), "PNG"), (3, 16, 16), fit="pad")
    assert (thin.any((1, 2))).tolist() == [row == 7 for row in range(16)]


@pytest.mark.parametrize("fit", ["pad", "squash"])
def test_a_square_image_fits_in_every_way(fit):
    for size in (16, 40):
        content = encoded(picture(np.random.default_rng(0), size, size), "PNG")
        assert np.abs(decode(content, RGB, fit=fit).astype(int) - decode(content, RGB)).max() <= 1


def test_shrinking_does_not_alias():
    stripes = np.zeros((256, 256), np.uint8)
    stripes[:, ::2] = 255
    shrunk = decode(png(stripes), (1, 16, 16))
    assert np.abs(shrunk.astype(int) - 127).max() <= 4


@pytest.mark.parametrize(
    ("content", "colour"),
    [
        (lambda: encoded(flat((0, 255, 255, 0), "CMYK"), "JPEG", quality=95), (255, 0, 0)),
        (lambda: encoded(Image.fromarray(np.full((40, 40), 0x8080, np.uint16)), "PNG"), (128, 128, 128)),
        (lambda: encoded(Image.fromarray(np.full((40, 40), 300, np.uint16)), "TIFF"), (1, 1, 1)),
        (lambda: b"P5 4 4 65535\n" + b"\x40\x40" * 16, (64, 64, 64)),
        (lambda: encoded(flat((200, 10, 0, 0), "RGBA"), "PNG"), (255, 255, 255)),
        (lambda: encoded(flat((0, 100, 0, 51), "RGBA"), "PNG"), (204, 224, 204)),
        (lambda: encoded(flat((0, 51), "LA"), "PNG"), (204, 204, 204)),
        (lambda: encoded(flat((9, 8, 7)).quantize(2), "PNG", transparency=0), (255, 255, 255)),
        (lambda: encoded(flat(10, "L"), "PNG", transparency=10), (255, 255, 255)),
        (lambda: encoded(flat(1, "1"), "PNG"), (255, 255, 255)),
        (lambda: encoded(flat((9, 80, 70)).quantize(2), "GIF"), (9, 80, 70)),
        (
            lambda: encoded(flat((250, 0, 0)), "GIF", save_all=True, append_images=[flat((0, 0, 250))]),
            (250, 0, 0),
        ),
        (lambda: encoded(flat((250, 0, 0)).convert("YCbCr"), "JPEG", quality=95), (250, 0, 0)),
    ],
    ids=[
        "CMYK",
        "16-bit PNG",
        "16-bit TIFF",
        "16-bit PPM",
        "clear",
        "translucent",
        "grey with alpha",
        "palette with alpha",
        "transparent grey",
        "1-bit",
        "palette",
        "animated",
        "YCbCr",
    ],
)
def test_colours_of_all_modes(content, colour):
    assert mean(content()) == pytest.approx(colour, abs=2.1)
    assert mean(content(), GREY)[0] == pytest.approx(np.dot(colour, (0.299, 0.587, 0.114)), abs=2.6)


def test_sixteen_bits_are_scaled():
    grey = picture(np.random.default_rng(0), 16, 16).convert("L")
    assert (decode(sixteen_bit(grey), GREY)[..., 0] == np.asarray(grey)).all()


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_with_values_of_twelve_are_remarked_on(form):
    values = np.random.default_rng(0).integers(0, 2**12, (16, 16)).astype(np.uint16)
    for factor, expected in ((1, [DIM]), (16, [])):
        remarks = []
        pixels_HWC = decode(encoded(Image.fromarray(values * factor), form), GREY, remarks=remarks)
        assert remarks == expected
        assert np.abs(pixels_HWC[..., 0] - values * factor / 257.0).max() <= 0.5


@pytest.mark.parametrize("in_element", [False, True])
@pytest.mark.parametrize(("form", "name"), [("JPEG", "xmp"), ("PNG", "pnginfo"), ("TIFF", "tiffinfo"), ("WEBP", "xmp")])
def test_an_orientation_in_xmp_alone_is_heeded(form, name, in_element):
    halves = np.zeros((16, 16, 3), np.uint8)
    halves[:8] = 250
    tag = ("><tiff:Orientation>6</tiff:Orientation></r:Description>") if in_element else ' tiff:Orientation="6"/>'
    xmp = (
        '<x:xmpmeta xmlns:x="adobe:ns:meta/"><r:RDF xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        f'<r:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/"{tag}</r:RDF></x:xmpmeta>'
    )
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", xmp)
    value = {"pnginfo": info, "tiffinfo": {700: xmp.encode()}, "xmp": xmp.encode()}[name]
    upright = decode(encoded(Image.fromarray(halves), form, **{name: value}), GREY)[..., 0]
    assert upright[:, 12:].mean() > 240 and upright[:, :4].mean() < 10


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(orientation):
    quarters = np.zeros((16, 16), np.uint8)
    quarters[:8, :8], quarters[:8, 8:], quarters[8:, :8] = 250, 170, 90
    turns = {1: [], 2: ["lr"], 3: ["r", "r"], 4: ["ud"], 5: ["lr", "r"], 6: ["r"], 7: ["lr", "r", "r", "r"]}
    stored = quarters
    for turn in turns.get(orientation, ["r"] * 3):
        # The inverse of how EXIF says to turn it.
        stored = {"lr": np.fliplr, "ud": np.flipud, "r": np.rot90}[turn](stored)
    upright = decode(rotated(Image.fromarray(stored), orientation), GREY)[..., 0]
    assert np.abs(upright.astype(int) - quarters).mean() < 6


def test_a_broken_exif_block_spoils_nothing():
    content = bytearray(rotated(flat((10, 200, 30))))
    start = content.index(b"Exif\0\0") + 6
    content[start : start + 8] = b"\xff" * 8
    assert mean(bytes(content)) == pytest.approx((10, 200, 30), abs=3)


@pytest.mark.parametrize("kind", GOOD)
def test_good_images_of_many_kinds(kind):
    content = GOOD[kind](picture(np.random.default_rng(0)))
    for shape in (RGB, GREY):
        pixels_HWC = decode(content, shape)
        assert pixels_HWC.shape == (16, 16, shape[0])
        assert pixels_HWC.std() > 5


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_images_are_refused_in_a_line_that_stays_the_same(kind):
    content = BROKEN[kind](picture(np.random.default_rng(0)))
    reasons = set()
    for _ in range(2):
        with pytest.raises(DECODER_ERRORS) as error:
            decode(content, RGB)
        reasons.add(rejection(error.value))
    (reason,) = reasons
    assert "\n" not in reason
    assert not re.search("0x[0-9a-f]{4}", reason)
    assert len(reason) < 250


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "ValueError: empty file"),
        (b"", "ValueError: empty file"),
        (b"no image at all", "UnidentifiedImageError: not an image of a known format"),
        (encoded(flat((9, 8, 7)), "AVIF")[:200], "UnidentifiedImageError: AVIF that ends early, is damaged, or is of"),
        (header_only(30_000, 3_000), f"DecompressionBombError: 30000 x 3000 pixels are more than {MAX_PIXELS}"),
        (encoded(flat((1,), "F"), "TIFF"), "ValueError: mode F: 32-bit values have no range that is white and"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "UnidentifiedImageError: not"),
    ],
    ids=["none", "empty", "text", "AVIF", "bomb", "floats", "PostScript"],
)
def test_reasons(content, reason):
    with pytest.raises(DECODER_ERRORS) as error:
        decode(content, RGB)
    assert rejection(error.value).startswith(reason)


def test_reasons_are_text_that_can_be_stored():
    assert rejection(ValueError("a\nb \udcff <_io.BytesIO object at 0x7f00>")) == "ValueError: a b \\udcff the file"
    assert rejection(MemoryError()) == "MemoryError"


@pytest.mark.parametrize("form", FORMATS)
def test_a_mutated_file_decodes_or_is_refused(form):
    generator = np.random.default_rng(list(FORMATS).index(form))
    content = encoded(picture(generator, 40, 30), form, **FORMATS[form])
    reasons = []
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(generator.integers(1, 5)):
            # Headers are short, and where plug-ins are weakest.
            place = generator.integers(min(64, len(damaged))) if generator.random() < 0.5 else None
            damaged[generator.integers(len(damaged)) if place is None else place] = generator.integers(256)
        if generator.random() < 0.3:
            damaged = damaged[: generator.integers(len(damaged))]
        try:
            pixels_HWC = decode(bytes(damaged), RGB)
        except DECODER_ERRORS as error:
            reasons.append(rejection(error))
        else:
            assert pixels_HWC.shape == (16, 16, 3) and pixels_HWC.dtype == np.uint8
    assert len(reasons) > 30
    assert all("\n" not in reason and "0x" not in reason for reason in reasons)


@pytest.mark.parametrize("channels", [1, 3])
def test_thumbnails(channels):
    pixels_HWC = np.full((100, 50, channels), 77, np.uint8)
    with Image.open(io.BytesIO(thumbnail(pixels_HWC))) as image:
        assert (image.format, image.size) == ("JPEG", (32, 64))
        assert np.asarray(image).mean() == pytest.approx(77, abs=2)
    with Image.open(io.BytesIO(thumbnail(pixels_HWC[:8, :8]))) as image:
        assert image.size == (8, 8)


def test_images_are_found_by_all_names_of_the_formats_that_are_decoded():
    named = {name[1:] for name, kind in Image.registered_extensions().items() if kind in images.FORMATS}
    assert named == EXTENSIONS
    for kind in ("AVIF", "JPEG2000"):
        pixels_HWC = decode(encoded(flat((10, 200, 30)), kind), RGB)
        assert pixels_HWC.reshape(-1, 3).mean(axis=0) == pytest.approx((10, 200, 30), abs=3)


def smooth(width: int, height: int, mode: str) -> Image.Image:
    """Colours, and transparency where the mode has any, that change from side to side."""
    generator = np.random.default_rng(0)
    coarse = [generator.integers(0, 256, (4, 5), dtype=np.uint8) for _ in Image.new(mode, (1, 1)).getbands()]
    bands = [Image.fromarray(band).resize((width, height), Image.Resampling.BICUBIC) for band in coarse]
    return Image.merge(mode, bands)


@pytest.mark.parametrize(
    "content",
    [
        encoded(smooth(641, 402, "RGBA"), "PNG"),
        encoded(smooth(401, 642, "LA"), "PNG"),
        encoded(smooth(500, 500, "RGB"), "TIFF"),
        palette_with_alpha(smooth(400, 400, "RGB")),
        sixteen_bit(smooth(650, 400, "L")),
        rotated(smooth(402, 641, "RGB")),
    ],
    ids=["RGBA", "LA", "TIFF", "palette", "16 bits", "rotated"],
)
@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 40, 24), (3, 300, 200)])
def test_large_images_are_converted_in_bands(content, shape, monkeypatch):
    at_once = decode(content, shape)
    monkeypatch.setattr(images, "_LARGE", 10_000)
    monkeypatch.setattr(images, "_BAND", 5_000)
    in_bands = decode(content, shape)
    assert np.abs(at_once.astype(int) - in_bands).max() <= 12
    assert np.abs(at_once.astype(int) - in_bands).mean() < 1


def test_a_large_image_of_the_right_size_is_untouched(monkeypatch):
    content = encoded(smooth(120, 80, "RGBA"), "PNG")
    at_once = decode(content, (3, 80, 120))
    monkeypatch.setattr(images, "_LARGE", 1_000)
    monkeypatch.setattr(images, "_BAND", 500)
    assert (decode(content, (3, 80, 120)) == at_once).all()


@pytest.mark.parametrize(("orientation", "size"), [(1, (1030, 771)), (6, (771, 1030)), (3, (1201, 1203))])
def test_a_jpeg_that_is_drafted_is_as_good_as_one_that_is_not(orientation, size, monkeypatch):
    content = rotated(smooth(*size, "RGB"), orientation)
    drafted = decode(content, (3, 60, 64))
    calls = []
    monkeypatch.setattr(JpegImageFile, "draft", lambda image, mode, size: calls.append(size))
    complete = decode(content, (3, 60, 64))
    assert calls == [(128, 128)]
    assert not (drafted == complete).all()
    assert np.abs(drafted.astype(int) - complete).max() <= 4
    assert np.abs(drafted.astype(int) - complete).mean() < 0.7


@pytest.mark.parametrize("channels", [1, 3])
def test_a_jpeg_that_is_hardly_larger_is_not_drafted(channels, monkeypatch):
    content = encoded(smooth(127, 127, "RGB"), "JPEG")
    decoded = decode(content, (channels, 32, 32))
    monkeypatch.setattr(JpegImageFile, "draft", lambda image, mode, size: None)
    assert (decode(content, (channels, 32, 32)) == decoded).all()
