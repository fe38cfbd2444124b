"""Pictures as files: PNG, JPEG or WebP by the ending of their name; names that say what a picture shows."""

import os
import re
from pathlib import Path

from PIL import Image

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
"""Formats that pictures are written in, by the ending of a name."""
QUALITY = 95
"""Quality of JPEG and WebP, of 100."""
MOST_LETTERS = 60
_NO_NAME = re.compile(r"[\W_]+")


def write(picture: Image.Image, path: str | os.PathLike[str]) -> None:
    """Write a picture in the format of its ending, one of FORMATS; a file is either there as a whole or not."""
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        picture.save(unfinished, FORMATS[path.suffix.lower()], quality=QUALITY)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def file_name(shows: str, seed: int, ending: str) -> str:
    """A file's name that says what its picture shows, in letters and digits of any script, and by which seed."""
    words = _NO_NAME.sub("-", shows).strip("-")[:MOST_LETTERS].rstrip("-")
    return f"{words}-{seed}{ending}" if words else f"{seed}{ending}"
