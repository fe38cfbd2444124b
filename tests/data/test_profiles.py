"""Images with a colour profile are trained on as they look: in sRGB."""

import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms, PngImagePlugin, features

from ddm_ray.config import DataConfig
from ddm_ray.data import images
from ddm_ray.data.images import decode
from ddm_ray.data.prepare.decoding import decode_rows
from ddm_ray.data.profiles import NO_PROFILE
from ddm_ray.data.sources import Encoded
from tests.data import icc_profiles

SIDE, RGB, GREY = 24, (3, 24, 24), (1, 24, 24)
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
LOSSLESS = {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True, "exact": True}, "JPEG2000": {"irreversible": False}}
LOSSY = {"JPEG": {"quality": 100, "subsampling": 0}, "AVIF": {"quality": 100}}
FORMATS = LOSSLESS | {name: settings for name, settings in LOSSY.items() if name != "AVIF" or features.check("avif")}
WHICH = {"p3": icc_profiles.DISPLAY_P3, "adobe": icc_profiles.ADOBE_RGB}


def encoded(image: Image.Image, form: str, profile: bytes) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, icc_profile=profile, **FORMATS[form])
    content = buffer.getvalue()
    if form == "JPEG2000":  # Pillow writes that it is sRGB
        place = content.index(b"colr\1") - 4
        old = int.from_bytes(content[place : place + 4], "big")
        box = (len(profile) + 11).to_bytes(4, "big") + b"colr\2\0\0" + profile
        header = content.index(b"jp2h") - 4
        size = int.from_bytes(content[header : header + 4], "big") + len(box) - old
        content = (
            content[:header] + size.to_bytes(4, "big") + content[header + 4 : place] + box + content[place + old :]
        )
    return content


def pale(channels: int = 3) -> np.ndarray:
    """Smooth colours that sRGB has whichever profile they are of: pixels_HWC."""
    low, high = np.meshgrid(np.linspace(110, 170, SIDE), np.linspace(170, 110, SIDE))
    return np.stack([low, high, (low + high) / 2], axis=-1)[..., :channels].round().astype(np.uint8)


def seen(pixels_HWC: np.ndarray, primaries: tuple[tuple[float, float], ...], gamma: float = 2.2) -> np.ndarray:
    """Pixels of RGB with these primaries as pixels of sRGB, by IEC 61966-2-1."""
    linear = (pixels_HWC / 255) ** gamma @ icc_profiles.xyz_of(primaries).T
    linear = (linear @ np.linalg.inv(icc_profiles.xyz_of(icc_profiles.SRGB)).T).clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("which", WHICH)
def test_colours_are_those_that_the_profile_says(form: str, which: str) -> None:
    pixels_HWC, remarks = pale(), list[str]()
    content = encoded(Image.fromarray(pixels_HWC), form, icc_profiles.rgb(WHICH[which]))
    expected = seen(pixels_HWC, WHICH[which])
    assert np.abs(expected - pixels_HWC).max() > 8
    assert np.abs(decode(content, RGB, remarks=remarks) - expected).max() < (1.5 if form in LOSSLESS else 7)
    assert remarks == []


@pytest.mark.parametrize("form", LOSSLESS)
def test_a_profile_of_srgb_changes_no_pixel(form: str) -> None:
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    assert (decode(encoded(Image.fromarray(pixels_HWC), form, SRGB), RGB) == pixels_HWC).all()


@pytest.mark.parametrize("shape", [RGB, GREY])
def test_grey_has_the_curve_of_its_profile(shape: tuple[int, int, int]) -> None:
    """Also by the profile of the colour image that it was."""
    pixels_HW = pale(1)[..., 0]
    expected = seen(np.stack([pixels_HW] * 3, axis=-1), icc_profiles.SRGB, 1.8)[..., : shape[0]]
    for profile in (icc_profiles.grey(1.8), icc_profiles.rgb(gamma=1.8)):
        for grey in (Image.fromarray(pixels_HW), Image.fromarray(pixels_HW.astype(np.uint16) * 257)):
            assert np.abs(decode(encoded(grey, "PNG", profile), shape) - expected).max() < 1.5


def test_inks_are_mixed_by_their_profile() -> None:
    """One by which cyan is a dark yellow."""
    inks, remarks = Image.new("CMYK", (SIDE, SIDE), (255, 0, 0, 0)), list[str]()
    assert inks.convert("RGB").getpixel((0, 0)) == (0, 255, 255)
    for form in ("TIFF", "JPEG"):
        content = encoded(inks, form, icc_profiles.inks())
        red, green, blue = decode(content, RGB, remarks=remarks).reshape(-1, 3).mean(axis=0)
        assert red > green > blue + 20 and red < 200 and remarks == []


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_stays_so(mode: str) -> None:
    """Palettes too: the left half shows the white below, the right half its colour."""
    image = Image.fromarray(np.dstack([pale(), np.full((SIDE, SIDE), 255, np.uint8)]))
    image.paste((150, 120, 130, 0), (0, 0, SIDE // 2, SIDE))
    image = image.quantize(8) if mode == "P" else image.convert(mode)
    pixels_HWC = decode(encoded(image, "PNG", icc_profiles.rgb(icc_profiles.DISPLAY_P3)), RGB)
    assert (pixels_HWC[:, : SIDE // 2] == 255).all()
    coloured = np.asarray(image.convert("RGB"))[:, SIDE // 2 :]
    assert np.abs(pixels_HWC[:, SIDE // 2 :] - seen(coloured, icc_profiles.DISPLAY_P3)).max() < 1.5


def test_bands_of_a_large_image_have_the_same_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Image.fromarray(pale()).resize((96, 96))
    content = encoded(wide, "PNG", icc_profiles.rgb(icc_profiles.ADOBE_RGB))
    at_once = decode(content, RGB).astype(int)
    monkeypatch.setattr(images, "_LARGE", 1000)
    monkeypatch.setattr(images, "_BAND", 2000)
    assert np.abs(decode(content, RGB) - at_once).max() <= 2


UNUSABLE: dict[str, Callable[[], tuple[Image.Image, bytes, str]]] = {
    "damaged": lambda: (Image.fromarray(pale()), b"no profile" * 20, "cannot open profile from string"),
    "of grey": lambda: (Image.fromarray(pale()), icc_profiles.grey(), "it is for GRAY, and the image is RGB"),
    "of RGB": lambda: (Image.new("CMYK", (SIDE, SIDE)), icc_profiles.rgb(), "it is for RGB, and the image is CMYK"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_profile_that_cannot_be_used_is_said(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image, profile, why = UNUSABLE[kind]()
    content, remarks = encoded(image, "TIFF", profile), list[str]()
    assert (decode(content, RGB, remarks=remarks) == np.asarray(image.convert("RGB"))).all()
    assert remarks == [f"its colour profile can't be used, so its colours are taken for sRGB: {why}"]
    monkeypatch.setattr(images, "_LARGE", 100)
    monkeypatch.setattr(images, "_BAND", 100)
    in_bands: list[str] = []
    decode(content, RGB, remarks=in_bands)
    assert in_bands == remarks, "once, however many bands there are"


def exif(space: int, index: str) -> bytes:
    tags = Image.Exif()
    tags.get_ifd(ExifTags.IFD.Exif).update({0xA001: space, 0xA005: {1: index}})
    return tags.tobytes()


def with_chunk(kind: bytes, data: bytes) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add(kind, data)
    return of_form("PNG", pnginfo=info)


def of_form(form: str, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pale()).save(buffer, form, **FORMATS[form] | settings)
    return buffer.getvalue()


def avif(primaries: int, curve: int) -> bytes:
    content = of_form("AVIF")
    place = content.index(b"nclx") + 4
    return content[:place] + bytes((0, primaries, 0, curve)) + content[place + 4 :]


GAMMA, PRIMARIES = struct.Struct(">I").pack, struct.Struct(">8I").pack
WHITE = (31270, 32900)
TOLD: dict[str, tuple[Callable[[], bytes], str]] = {
    "cICP": (lambda: with_chunk(b"cICP", bytes((12, 13, 0, 1))), "cICP"),
    "cICP of sRGB": (lambda: with_chunk(b"cICP", bytes((1, 13, 0, 1))), ""),
    "gAMA": (lambda: with_chunk(b"gAMA", GAMMA(55556)), "gAMA or cHRM"),
    "gAMA of sRGB": (lambda: with_chunk(b"gAMA", GAMMA(45455)), ""),
    "cHRM": (lambda: with_chunk(b"cHRM", PRIMARIES(*WHITE, 68000, 32000, 26500, 69000, 15000, 6000)), "gAMA or cHRM"),
    "cHRM of sRGB": (lambda: with_chunk(b"cHRM", PRIMARIES(*WHITE, 64000, 33000, 30000, 60000, 15000, 6000)), ""),
    "EXIF by DCF": (lambda: of_form("JPEG", exif=exif(65535, "R03")), "EXIF"),
    "EXIF by number": (lambda: of_form("WEBP", exif=exif(2, "")), "EXIF"),
    "EXIF of sRGB": (lambda: of_form("JPEG", exif=exif(1, "R98")), ""),
    "nclx": (lambda: avif(12, 13), "nclx"),
    "nclx of sRGB": (lambda: avif(1, 13), ""),
    "nclx of high dynamic range": (lambda: avif(9, 16), "nclx"),
    "nothing": (lambda: of_form("AVIF"), ""),
}


@pytest.mark.parametrize("kind", TOLD)
def test_colours_that_are_told_in_another_way_are_a_loss(kind: str) -> None:
    made, by = TOLD[kind]
    remarks = list[str]()
    decode(made(), RGB, remarks=remarks)
    assert remarks == ([f"{NO_PROFILE}: it stands in {by}, not in ICC"] if by else [])


@pytest.mark.parametrize("keyword", ["XML:com.adobe.xmp", "Raw profile type exif"])
def test_a_text_too_long_to_be_read_for_the_orientation_costs_neither_pixels_nor_colours(keyword: str) -> None:
    info, remarks = PngImagePlugin.PngInfo(), list[str]()
    info.add_itxt(keyword, "x" * (2 << 20), zip=True)
    pixels_HWC = decode(of_form("PNG", pnginfo=info, icc_profile=icc_profiles.rgb(WHICH["p3"])), RGB, remarks=remarks)
    assert np.abs(pixels_HWC - seen(pale(), WHICH["p3"])).max() < 1.5
    assert remarks == [images.UNTURNED]


def test_modes_that_are_others_in_another_form_have_profiles_too() -> None:
    profile = icc_profiles.rgb(icc_profiles.DISPLAY_P3)
    content = encoded(Image.fromarray(pale()).convert("YCbCr"), "TIFF", profile)
    assert Image.open(io.BytesIO(content)).mode == "YCbCr"
    assert np.abs(decode(content, RGB) - seen(pale(), icc_profiles.DISPLAY_P3)).max() < 5  # it is rounded twice


@pytest.mark.parametrize(("form", "extra", "mode"), [("PNG", 2, "LA"), ("TIFF", 2, "LA"), ("TIFF", 1, "La")])
def test_grey_with_transparency_has_the_curve_of_its_profile(form: str, extra: int, mode: str) -> None:
    """Also if the file says that its levels are multiplied by what covers them."""
    content = encoded(Image.new("LA", (SIDE, SIDE), (50, 128)), form, icc_profiles.grey(1.0))
    content = content.replace(struct.pack("<HHIH", 338, 3, 1, 2), struct.pack("<HHIH", 338, 3, 1, extra))
    assert Image.open(io.BytesIO(content)).mode == mode
    level = np.searchsorted(icc_profiles.linear(np.arange(256)), (50 if mode == "LA" else 100) / 255)
    assert np.abs(decode(content, GREY) - (level + 255) / 2).max() < 2


def test_a_colour_that_is_transparent_stays_so() -> None:
    image, profile = Image.fromarray(pale()), icc_profiles.rgb(icc_profiles.DISPLAY_P3)
    image.paste((200, 10, 20), (0, 0, SIDE // 2, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=(200, 10, 20), icc_profile=profile)
    assert (decode(buffer.getvalue(), RGB)[:, : SIDE // 2] == 255).all()


def test_a_profile_of_another_mode_is_said() -> None:
    content, remarks = encoded(Image.new("LAB", (SIDE, SIDE)), "TIFF", icc_profiles.rgb()), list[str]()
    decode(content, RGB, remarks=remarks)
    assert remarks == [f"{NO_PROFILE}: the image is LAB"]


@pytest.mark.contract
def test_a_loss_is_told_with_the_row() -> None:
    image, profile, why = UNUSABLE["damaged"]()
    rows = [Encoded("good", encoded(image, "PNG", SRGB), 0), Encoded("odd", encoded(image, "TIFF", profile), 0)]
    decoded = decode_rows(rows, DataConfig(source="x", class_names=("a",), channels=3, image_size=SIDE))
    assert decoded.ids == ["good", "odd"] and decoded.rejected == []
    ((row, reason),) = [tuple(loss.values()) for loss in decoded.losses]
    assert row == "odd" and reason.endswith(why)
