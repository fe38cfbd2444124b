"""Pictures as PNG files. Without torch, which processes that only read images don't load."""

import io

from PIL import Image


def to_png(picture: Image.Image, compression: int | None = None) -> bytes:
    """The picture as a PNG file, as small as it gets; with a `compression` of 0 to 9 sooner, and larger."""
    buffer = io.BytesIO()
    if compression is None:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.save(buffer, "PNG", compress_level=compression)
    return buffer.getvalue()
