"""Pictures as PNG files. Imports no torch, for processes that only read images."""

import io

from PIL import Image


def to_png(picture: Image.Image, compression: int | None = None) -> bytes:
    """The picture as the smallest PNG file; `compression` 0 to 9 is faster, and the file larger."""
    buffer = io.BytesIO()
    if compression is None:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.save(buffer, "PNG", compress_level=compression)
    return buffer.getvalue()
