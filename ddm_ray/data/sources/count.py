"""Number of images in a source, as far as a look at its names and footers tells."""

import pyarrow as pa
import pyarrow.parquet as pq

from ddm_ray.config import DataConfig
from ddm_ray.data.sources import DIGITS, SHAPES, open_source
from ddm_ray.data.sources.collection import extension
from ddm_ray.data.sources.files import Files
from ddm_ray.errors import DataError, StorageError

DIGITS_ROWS = 1797


def count_rows(config: DataConfig) -> int | None:
    """Images of the configured source, usable or not; None where only reading tells: tars, what isn't on this disk."""
    name = config.source
    if name == DIGITS:
        return DIGITS_ROWS
    if "://" in name:
        return None
    try:
        source = open_source(config)
        if name.startswith(SHAPES):
            return int(name.removeprefix(SHAPES).replace("_", ""))
        paths = [path for unit in source.list().units for path in unit.files]
        kinds = {extension(path) for path in paths}
        if kinds == {"parquet"}:
            files = Files(name)
            return sum(pq.read_metadata(files.open_anywhere(path)).num_rows for path in paths)
    except (DataError, StorageError, OSError, pa.ArrowException):
        return None  # preparing says so
    return None if kinds & {"tar"} else len(paths)
