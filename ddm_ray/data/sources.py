"""Sources: where encoded images come from. A source is a Ray Dataset with the columns of `schema.SOURCE`."""

import io

import numpy as np
import pyarrow as pa
import ray.data
from PIL import Image

from ddm_ray.config import DataConfig
from ddm_ray.data.schema import SOURCE
from ddm_ray.errors import DataError

ROWS_PER_BLOCK = 1024


def open_source(config: DataConfig) -> ray.data.Dataset:
    """The images that `config.source` names. DataError if there is no such source."""
    tables = {"digits": digits}
    if config.source not in tables:
        raise DataError(f"data.source {config.source!r}: no such source here; there is {', '.join(tables)}")
    return from_table(tables[config.source]())


def from_table(table: pa.Table) -> ray.data.Dataset:
    """A source held in memory, in blocks that Ray works on side by side."""
    table = table.select(SOURCE.names).cast(SOURCE)
    starts = range(0, max(1, table.num_rows), ROWS_PER_BLOCK)
    return ray.data.from_arrow([table.slice(start, ROWS_PER_BLOCK) for start in starts])


def digits() -> pa.Table:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, as PNG files."""
    from sklearn.datasets import load_digits

    pixels_NHW, labels = load_digits(return_X_y=True)
    pixels_NHW = np.rint(pixels_NHW.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    ids = [f"digits/{index:04d}" for index in range(len(labels))]
    return pa.table([ids, [png(pixels_HW) for pixels_HW in pixels_NHW], labels], schema=SOURCE)


def png(pixels: np.ndarray) -> bytes:
    """An image uint8, (H, W) or (H, W, 3), as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
