"""Files that people have among their pictures, and what becomes of each: a table, of which the page is made, too.

`python -m tests.data.odd_files` writes docs/reference/pictures.md again.
"""

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin, TiffImagePlugin

from ddm_ray.plain_text import LFS_POINTER
from tests.conftest import ROOT
from tests.data import icc_profiles

PAGE = ROOT / "docs/reference/pictures.md"
Outcome = Literal["read", "left out", "skipped"]
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


@dataclass(frozen=True)
class Kind:
    """A kind of files, and what becomes of them. `detail`: for the page; `says`: how the reason or the count begins."""

    what: str
    outcome: Outcome
    detail: str
    files: Callable[[], Iterator[OddFile]]
    says: str = ""


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


def with_profiles() -> Iterator[OddFile]:
    """In their own primaries, the colour that is COLOUR in sRGB."""
    for name, primaries in (("p3", icc_profiles.DISPLAY_P3), ("adobe", icc_profiles.ADOBE_RGB)):
        linear = icc_profiles.linear(np.array(COLOUR)) @ icc_profiles.xyz_of(icc_profiles.SRGB).T
        own = (linear @ np.linalg.inv(icc_profiles.xyz_of(primaries)).T).clip(0, 1) ** (1 / 2.2)
        image = Image.new("RGB", (24, 20), tuple(int(level) for level in (255 * own).round()))
        for form in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
            data = saved(image, form, icc_profile=icc_profiles.rgb(primaries))
            yield OddFile(f"{name}-{form}.{ending(form)}", data, within=6)


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
    names = [
        "with a space",
        "a#b",
        "a'b",
        'a"b',
        "a;b",
        "-dash",
        "a.b.c",
        "café",
        "cafe\u0301",
        "日本語",
        "🦀",
        "%20",
        "a&b",
        "$HOME",
        "[x]",
        "a*b",
    ]
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


PICTURE = saved(flat("RGB"), "PNG")
FORMATS = {
    "JPEG": "grey, colour, CMYK",
    "PNG": "one bit to 16 bits, palettes, transparency",
    "WEBP": "with and without loss",
    "GIF": "palettes",
    "BMP": "one bit to 24 bits",
    "TIFF": "one bit to 16 bits, CMYK, palettes",
    "PPM": "also PGM, PBM and PNM",
    "AVIF": "with transparency or without",
    "JPEG2000": "also JP2 and its other endings",
}
KINDS = [
    *(Kind(form, "read", detail, in_all_modes(form)) for form, detail in FORMATS.items()),
    Kind("transparent pictures", "read", "over white", transparent),
    Kind("a colour profile (ICC) of any kind", "read", "in sRGB", with_profiles),
    Kind("the profile of sRGB", "read", "as without it", with_usual_profiles),
    Kind("an orientation in EXIF, or in XMP", "read", "upright", turned),
    Kind("16 bits with values of 12 bits", "read", "nearly black: multiply them by 16", dim),
    Kind("moving pictures, and files of several pages", "read", "the first frame", moving),
    Kind(
        "long or damaged metadata: texts, EXIF, XMP, profiles", "read", "the pixels; metadata are dropped", odd_metadata
    ),
    Kind("any name, in any alphabet", "read", "spaces and signs too", named),
    Kind("a picture with the ending of another format", "read", "by its contents", of_another_format),
    Kind("a file that ends early", "left out", "download it again", cut_short),
    Kind("an empty file", "left out", "fetch it again", each(b"", "empty.png", "empty.jpg"), "ValueError: empty file"),
    Kind(
        "text, HTML or anything else that is called a picture",
        "left out",
        "fetch the picture again",
        each(b"<html>not found</html>", "page.jpg", "page.png"),
        "UnidentifiedImageError: not an image of a known format",
    ),
    Kind(
        "a pointer of Git LFS",
        "left out",
        "`git lfs pull` fetches the picture",
        each(LFS_POINTER + b"v1\noid sha256:4d7a\nsize 12345\n", "lfs.png"),
        "ValueError: a pointer of Git LFS, not the image",
    ),
    Kind("values of 32 bits", "left out", "save them with 8 or 16", wide_values, "ValueError: mode "),
    Kind(
        "more than 89 million pixels", "left out", "make it smaller", each(bomb(), "bomb.png"), "DecompressionBombError"
    ),
    Kind(
        "photographs of cameras and telephones: HEIC, HEIF, DNG, CR2, NEF, ARW, ...",
        "skipped",
        "convert them to JPEG or PNG",
        each(b"raw", "IMG_1.HEIC", "IMG_2.heif", "IMG_3.dng", "IMG_4.CR2", "IMG_5.nef"),
        ".",
    ),
    Kind("other files", "skipped", "nothing", each(b"x", "notes.txt", "clip.mov", "a.pdf", "a.svg", "a.psd"), "."),
    Kind(
        "files without an ending",
        "skipped",
        "give pictures one",
        each(PICTURE, "README", "picture"),
        "without an ending",
    ),
    Kind(
        "names that begin with a dot, `Thumbs.db`, `desktop.ini`",
        "skipped",
        "rename pictures",
        each(PICTURE, ".DS_Store", "._IMG.png", ".cache/a.png", "Thumbs.db", "desktop.ini"),
        "hidden",
    ),
    Kind(
        "folders that systems create: `@eaDir`, `#recycle`, `$RECYCLE.BIN`, `__MACOSX`, `lost+found`, ...",
        "skipped",
        "move pictures out of them",
        each(PICTURE, *(f"{name}/a.png" for name in ("@eaDir", "#recycle", "$RECYCLE.BIN", "__MACOSX", "lost+found"))),
        "in ",
    ),
]
HEAD = """\
# What your pictures may be

`ddm prepare` reads every picture correctly, or says why it doesn't. The numbers always agree: files are rows, images
that are left out with a reason, or files that are skipped. `ddm init` and `ddm prepare` print the counts, and
`RUN/rows/_rejected` has the reason for each image that is left out. Where more than 5 % of the images are left out,
`ddm prepare` stops; `--max-rejected` allows more.
"""
TAIL = """\
A tar is left out from where it ends early, with a reason. Several images of one key count as that many losses: the key
of a member ends at the first dot of its name. Labels may be whole numbers of any type (also `3.0`), texts, or truth
values. Text files are UTF-8, with or without a byte-order mark. Names are compared in one form, so that the `é` of a
Mac is that of your keyboard.

A source with folders or files called `train`, `val` and `test` asks which of these the run is of: `data.split=train`,
or `all`. A run may lie in the folder of its own images: what it contains isn't read.

Links are followed. A link to nothing is left out; pipes, sockets, devices and circular links are skipped.
"""


def page() -> str:
    """The page of the documentation."""
    titles = {"read": "What is read", "left out": "What is left out", "skipped": "What is skipped"}
    parts = [HEAD]
    for outcome, title in titles.items():
        rows = [f"| {kind.what} | {kind.detail} |" for kind in KINDS if kind.outcome == outcome]
        parts.append("\n".join([f"## {title}", "", "| what | how, or what to do |", "|---|---|", *rows, ""]))
    return "\n".join([*parts, "## In other files", "", TAIL])


if __name__ == "__main__":
    PAGE.write_text(page())
