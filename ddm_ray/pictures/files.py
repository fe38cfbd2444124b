"""Picture files: PNG, JPEG or WebP by the extension; file names that describe the picture."""

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from ddm_ray.pictures.png import to_png

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
"""Formats of picture files, by extension."""
QUALITY = 95
"""Quality of JPEG and WebP, out of 100."""
MAX_LETTERS = 60
_NO_NAME = re.compile(r"[\W_]+")


def write(picture: Image.Image, path: str | os.PathLike[str]) -> None:
    """Write a picture in the format of its extension, one of FORMATS, as a `whole_file`."""
    with whole_file(path) as unfinished:
        picture.save(unfinished, FORMATS[Path(path).suffix.lower()], quality=QUALITY)


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path to write to: the file then appears complete at `path`, or not at all. An OSError names `path`.

    A link stays, and its file is replaced. A device or pipe is written to as it is, as is `/dev/stdout`.
    """
    target, given = Path(os.path.realpath(path)), Path(path)
    is_file = (given.is_file() or not given.exists()) and given.parts[:2] not in (("/", "dev"), ("/", "proc"))
    unfinished = target.with_name(f".{target.name}.{os.getpid()}") if is_file else given
    try:
        yield unfinished
        if is_file:
            unfinished.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from None
    finally:
        if is_file:
            unfinished.unlink(missing_ok=True)


def to_file(picture: Image.Image, form: str, quality: int = QUALITY) -> bytes:
    """The picture as a file of the format `form`, an extension of FORMATS without its dot; a PNG has no quality."""
    if form == "png":
        return to_png(picture)
    buffer = io.BytesIO()
    picture.save(buffer, FORMATS[f".{form}"], quality=quality)
    return buffer.getvalue()


def file_name(shows: str, seed: int, ending: str) -> str:
    """A file name made of what the picture shows, in letters and digits of any script, and of its seed."""
    words = _NO_NAME.sub("-", shows).strip("-")[:MAX_LETTERS].rstrip("-")
    return f"{words}-{seed}{ending}" if words else f"{seed}{ending}"
