"""Files that people have among their pictures, and what becomes of each: a table, of which the page is made, too.

`python -m tests.data.odd_files` writes docs/reference/pictures.md again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ddm_ray.plain_text import LFS_POINTER
from tests.conftest import ROOT
from tests.data.odd_pictures import (
    OddFile,
    bomb,
    cut_short,
    damaged_chunks,
    dim,
    each,
    flat,
    in_all_modes,
    moving,
    named,
    odd_metadata,
    of_another_format,
    saved,
    tiffs_of_many_bits,
    told_in_another_way,
    transparent,
    turned,
    wide_values,
    with_profiles,
    with_usual_profiles,
)

PAGE = ROOT / "docs/reference/pictures.md"
Outcome = Literal["read", "left out", "skipped"]


@dataclass(frozen=True)
class Kind:
    """A kind of files, and what becomes of them. `detail`: for the page; `says`: how the reason or the count begins."""

    what: str
    outcome: Outcome
    detail: str
    files: Callable[[], Iterator[OddFile]]
    says: str = ""


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
    Kind("colours told by EXIF, gAMA, cHRM, cICP or nclx", "read", "as sRGB, and counted", told_in_another_way),
    Kind("the profile of sRGB", "read", "as without it", with_usual_profiles),
    Kind("an orientation in EXIF, or in XMP", "read", "upright", turned),
    Kind("16 bits with values of 12 bits", "read", "nearly black: multiply them by 16", dim),
    Kind("TIFF of 12 bits, in big-endian order, or with 0 for white", "read", "by its header", tiffs_of_many_bits),
    Kind("moving pictures, and files of several pages", "read", "the first frame", moving),
    Kind(
        "long or damaged metadata: texts, EXIF, XMP, profiles", "read", "the pixels; metadata are dropped", odd_metadata
    ),
    Kind("any name, in any alphabet", "read", "spaces and signs too", named),
    Kind("a picture with the ending of another format", "read", "by its contents", of_another_format),
    Kind("a file that ends early", "left out", "download it again", cut_short),
    Kind(
        "a PNG with damaged transparency or EXIF",
        "left out",
        "download it again",
        damaged_chunks,
        "ValueError: damaged",
    ),
    Kind("an empty file", "left out", "fetch it again", each(b"", "empty.png", "empty.jpg"), "ValueError: empty file"),
    Kind(
        "text, HTML or anything else that is called a picture",
        "left out",
        "fetch the picture again",
        each(b"<html>not found</html>", "page.jpg", "page.png"),
        "UnidentifiedImageError: not an image of a known format",
    ),
    Kind(
        "HEIC and HEIF with the ending of another format",
        "left out",
        "convert them to JPEG or PNG",
        each(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(300), "IMG_7.jpg", "IMG_8.png"),
        "UnidentifiedImageError: HEIC, or HEIF, whatever its name; convert it",
    ),
    Kind(
        "JPEG XL with the ending of another format",
        "left out",
        "convert them to JPEG or PNG",
        lambda: (
            OddFile(f"xl-{start[0]}.jpg", start + bytes(99)) for start in (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n")
        ),
        "UnidentifiedImageError: JPEG XL, whatever its name; convert it",
    ),
    Kind(
        "a pointer of Git LFS",
        "left out",
        "`git lfs pull` fetches the picture",
        each(LFS_POINTER + b"v1\noid sha256:4d7a\nsize 12345\n", "lfs.png"),
        "ValueError: a pointer of Git LFS, not the file itself",
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
Damage that leaves a file readable can't be told from what was photographed: zeros in the middle of a WebP, AVIF, BMP,
PPM or uncompressed TIFF are black or smeared, and so is the rest of a JPEG that another program has closed. Compare
checksums where a disk or a download is in doubt.

A tar is left out from where it ends early, with a reason. Several images of one key count as that many losses: the key
of a member ends at the first dot of its name. Beside `IMG.png`, `IMG.1.png` is a loss, and
`IMG.mask_0.png` is none, since words tell what a member is for. `data.image_column=png` says that others aren't meant.
Hidden pictures of a tar, and those in systems' folders, are skipped and counted. Links in a tar aren't
followed: their samples are left out. Two tars that `cat` joined, and a compressed file called `.tar`, are errors.

Labels may be whole numbers of any type (also `3.0`), texts, or truth values. Text files are UTF-8, with or without a
byte-order mark. Names are compared in one form, so that the `é` of a Mac is that of your keyboard.

A source with folders or files called `train`, `val` and `test`, or `train2017` and `test_images`, also below one folder
for all, asks which of these the run is of: `data.split=train`, or `all`. A class called `train` beside others asks
nothing, nor do classes called `bullet train` and `crash test`.
Classes called `train` and `dev` beside others have to be named: `data.class_names=[bus, train, dev]`.
A run may lie in the folder of its own images: what it contains isn't read.

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
