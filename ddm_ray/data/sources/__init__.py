"""Sources of encoded images, and their units of work. Without Ray.

A source is named by a word, or consists of files in one of several formats: local, on S3-compatible storage or on the
Hugging Face hub. `registry.py` lists both by name.
"""

import os

from ddm_ray.config import DataConfig
from ddm_ray.data.sources import chunks
from ddm_ray.data.sources.chunks import Encoded, EncodedChunk, Listing, Source, Unit, chunk_rows
from ddm_ray.data.sources.collection import Collection, format_named, units_of
from ddm_ray.data.sources.conditions import Conditions
from ddm_ray.data.sources.files import MISNAMED, Files, local_path
from ddm_ray.data.sources.named import named_source
from ddm_ray.errors import DataError

__all__ = [
    "Encoded",
    "EncodedChunk",
    "Listing",
    "Source",
    "Unit",
    "absolute_name",
    "chunk_rows",
    "is_here",
    "open_source",
    "units_of",
]


def absolute_name(source: str) -> str:
    """The name that opens the same source from any folder: an absolute path for files on this disk.

    Raises DataError for a wrong URI, and for a path that isn't UTF-8, which no configuration can hold.
    """
    path = None if named_source(source) else local_path(source)
    if path is None:
        return source
    path = os.path.abspath(os.path.expanduser(path))
    if path != path.encode(errors="replace").decode():
        raise DataError(f"data.source {path!r}: {MISNAMED}")
    return path


def is_here(source: str) -> bool:
    """True for files on this disk, and for sources without files."""
    return "://" not in source or source.startswith("file://")


def open_source(config: DataConfig, source: str | None = None, chunk_rows: int | None = None) -> Source:
    """The images that `source` names, else `config.source`, in chunks of `chunk_rows` rows. Reads nothing yet.

    Raises DataError for an unknown kind of source, ConfigError for an unknown format.
    """
    name = source or config.source
    conditions, rows = Conditions(config), chunk_rows or chunks.chunk_rows(config)
    named = named_source(name)
    if named:
        return named.of(name, conditions, rows)
    if config.format is not None:
        format_named(config.format)
    return Collection(conditions, rows, Files(name))
