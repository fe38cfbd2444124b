"""Sources: where encoded images come from, and in which units of work. No Ray.

`digits`, `shapes:NUMBER`, or files: a folder of images, WebDataset tars, parquet in the Hugging Face layout; local, on
S3-compatible storage or on the Hugging Face hub.
"""

from ddm_ray.config import DataConfig
from ddm_ray.data.sources import chunks
from ddm_ray.data.sources.builtin import Digits, Shapes
from ddm_ray.data.sources.chunks import Chunk, Encoded, Source, Unit, chunk_rows
from ddm_ray.data.sources.collection import Collection
from ddm_ray.data.sources.conditions import Conditions
from ddm_ray.data.sources.files import Files
from ddm_ray.errors import DataError

__all__ = ["Chunk", "Encoded", "Source", "Unit", "chunk_rows", "open_source"]


def open_source(
    config: DataConfig,
    source: str | None = None,
    chunk_rows: int | None = None,
    classes: tuple[str, ...] | None = None,
) -> Source:
    """The images that `source` names, else `config.source`; nothing is read yet.

    `chunk_rows`: rows of a chunk. `classes`: what another opening found (`Source.classes`). Raises DataError if there
    is no such kind of source.
    """
    name = source or config.source
    rows = chunk_rows or chunks.chunk_rows(config)
    conditions = Conditions(config, classes)
    if name == "digits":
        return Digits(conditions, rows)
    if name.startswith("shapes:"):
        count = name.removeprefix("shapes:").replace("_", "")
        if not count.isdecimal() or int(count) < 1:
            raise DataError(f"data.source {name!r}: shapes:NUMBER has a number from 1 up")
        return Shapes(int(count), conditions, rows)
    return Collection(Files(name), conditions, rows)
