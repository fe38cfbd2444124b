"""Colours of an image by its ICC profile, as colours of sRGB, which is what images without a profile are taken for."""

import io
import re
from functools import lru_cache

import numpy as np
from PIL import ExifTags, Image, ImageCms

from ddm_ray.spelling import one_line

NO_PROFILE = "its colour profile can't be used, so its colours are taken for sRGB"
"""Remark on an image."""
_SAME_LEVELS = 1
"""Largest difference, in levels of 255, of a profile that is taken for sRGB's own, so that pixels stay as they are."""
_GRID = 9
"""Levels of each channel at which a profile is compared with sRGB."""
_GREY = {"1", "L", "LA", "La"}
_COLOURS = {**dict.fromkeys(_GREY, "L"), **dict.fromkeys(("P", "RGB", "RGBA", "YCbCr"), "RGB"), "CMYK": "CMYK"}
"""Modes of loaded images, and those in which profiles apply to them."""
_CODES = re.compile(rb"(?:cICP|nclx\0)(.)\0?(.)", re.DOTALL)
"""Codes of primaries and curve by ITU-T H.273, in PNG and AVIF."""
_AS_SRGB = ({1, 2, 5, 6}, {1, 2, 6, 13})
"""Codes that are those of sRGB, nearly those, or say nothing."""
_GAMMA, _PRIMARIES = 1 / 2.2, (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)
"""Gamma and chromaticities of sRGB, as PNG states them."""


def in_srgb(image: Image.Image) -> tuple[Image.Image, str]:
    """A loaded image of 8 bits in sRGB, and a remark if its profile can't be used, else "".

    An image without a profile, or with one that is sRGB's to a level of 255, is returned as it is. The result may have
    another mode; it keeps its transparency.
    """
    profile, alpha = image.info.get("icc_profile"), None
    if image.has_transparency_data:
        image = image.convert("LA" if image.mode in _GREY else "RGBA")
        alpha = image.getchannel("A")
    if not profile or image.mode not in _COLOURS:
        return image, f"{NO_PROFILE}: the image is {image.mode}" if profile else ""
    try:
        transform, mode = _transform(bytes(profile), _COLOURS[image.mode])
        if transform is None:
            return image, ""
        converted = ImageCms.applyTransform(image if image.mode == mode else image.convert(mode), transform)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError) as error:
        return image, f"{NO_PROFILE}: {one_line(error, 80)}"
    assert converted is not None
    if alpha:
        converted.putalpha(alpha)
    return converted, ""


def unread_colours(image: Image.Image, encoded: bytes) -> str:
    """A remark on a loaded image if its file says that it isn't in sRGB, but not by a sound profile; else ""."""
    profile = image.info.get("icc_profile", b"")
    if profile is None:  # one that Pillow can't read
        return NO_PROFILE
    place = "" if profile else _other_colours(image, encoded)
    return f"{NO_PROFILE}: it stands in {place}, not in ICC" if place else ""


def _other_colours(image: Image.Image, encoded: bytes) -> str:
    """The place that says that an image without a profile isn't in sRGB; "" if nothing does."""
    if image.format in ("PNG", "AVIF") and (codes := _CODES.search(encoded, 0, 2**14)):
        as_srgb = all(code[0] in known for code, known in zip(codes.groups(), _AS_SRGB, strict=True))
        return "" if as_srgb else codes[0][:4].decode()
    own = (image.info.get("gamma", _GAMMA), *image.info.get("chromaticity", _PRIMARIES))
    differ = (abs(one - other) > 0.01 for one, other in zip(own, (_GAMMA, *_PRIMARIES), strict=True))
    if "srgb" not in image.info and any(differ):
        return "gAMA or cHRM"
    exif = image.getexif()
    of_adobe = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.ColorSpace) == 2
    of_adobe = of_adobe or exif.get_ifd(ExifTags.IFD.Interop).get(ExifTags.Interop.InteropIndex) == "R03"
    return "EXIF" if of_adobe else ""


def profile_of_jp2(encoded: bytes) -> bytes:
    """The profile in the header of a JP2 file, which Pillow doesn't read; empty if it has none.

    ISO/IEC 15444-1, I.5.3.3: in a box `colr` of method 2 or 3, after three bytes.
    """
    for method in (b"colr\2", b"colr\3"):
        if (place := encoded.find(method, 4, 2**16)) > 0:
            return encoded[place + 7 : place - 4 + int.from_bytes(encoded[place - 4 : place], "big")]
    return b""


@lru_cache(maxsize=64)
def _transform(profile: bytes, mode: str) -> tuple[ImageCms.ImageCmsTransform | None, str]:
    """The transform of an image in this mode to sRGB, None if it changes nothing, and the mode that it applies to.

    Raises PyCMSError, OSError or ValueError for a profile that is damaged, or of another kind of colours.
    """
    opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    space = opened.profile.xcolor_space.strip()
    if space == "RGB" and mode == "L":
        mode = "RGB"  # grey images often have the profile of the colour image that they were
    if (space, mode) not in (("RGB", "RGB"), ("GRAY", "L"), ("CMYK", "CMYK")):
        raise ValueError(f"it is for {space}, and the image is {mode}")
    transform = ImageCms.buildTransform(
        opened,
        ImageCms.createProfile("sRGB"),
        mode,
        "RGB",
        ImageCms.Intent.RELATIVE_COLORIMETRIC,
        ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    return (None if mode != "CMYK" and _is_srgb(transform, mode) else transform), mode


def _is_srgb(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    """True if a transform from RGB or grey changes no colour by more than a level."""
    levels = np.linspace(0, 255, _GRID).round().astype(np.uint8)
    grid_N3 = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(-1, 3)
    if mode == "L":
        grid_N3 = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, axis=1)
    grid = Image.fromarray(grid_N3[None])
    converted = ImageCms.applyTransform(grid.convert(mode), transform)
    assert converted is not None
    moved_N3 = np.asarray(converted, int)[0] - grid_N3
    return bool(np.abs(moved_N3).max() <= _SAME_LEVELS)
