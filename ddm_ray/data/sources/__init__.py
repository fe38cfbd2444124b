"""Sources: where encoded images come from, and in which units of work. No Ray.

`digits`, `shapes:NUMBER`, `domains`, `patches`, `emoji`, or files: a folder of images, WebDataset tars, parquet in the
Hugging Face layout, IDX as MNIST has it; local, on S3-compatible storage or on the Hugging Face hub.
"""

import os

from ddm_ray.config import DataConfig
from ddm_ray.data.sources import chunks
from ddm_ray.data.sources.builtin import Digits, Shapes
from ddm_ray.data.sources.chunks import Encoded, EncodedChunk, Listing, Source, Unit, chunk_rows
from ddm_ray.data.sources.collection import Collection, units_of
from ddm_ray.data.sources.conditions import Conditions
from ddm_ray.data.sources.files import Files
from ddm_ray.data.sources.packaged import DOMAINS, EMOJI, PATCHES, Emoji, PicturesOfKinds
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

DIGITS, SHAPES = "digits", "shapes:"
SETS = {pictures.name: pictures for pictures in (DOMAINS, PATCHES)}
"""Sets of pictures from packages, by name."""
NAMED, COUNTED = (DIGITS, EMOJI, *SETS), (SHAPES, *(f"{name}:" for name in SETS))
"""Names of what needs no files of the user's, and the beginnings of those that have a number, too."""


def absolute_name(source: str) -> str:
    """The name by which processes in other folders open the same source: a whole path, of files on this disk."""
    if source in NAMED or source.startswith(COUNTED) or "://" in source:
        return source
    return os.path.abspath(os.path.expanduser(source))


def is_here(source: str) -> bool:
    """True for files on this disk, and for what is made here."""
    return "://" not in source or source.startswith("file://")


def open_source(config: DataConfig, source: str | None = None, chunk_rows: int | None = None) -> Source:
    """The images that `source` names, else `config.source`, in chunks of `chunk_rows` rows; nothing is read yet.

    Raises DataError if there is no such kind of source.
    """
    name = source or config.source
    rows = chunk_rows or chunks.chunk_rows(config)
    if name == DIGITS:
        return Digits(Conditions(config), rows)
    if name == EMOJI:
        return Emoji(Conditions(config), rows)
    if name in SETS:
        return PicturesOfKinds(Conditions(config), rows, SETS[name], SETS[name].most)
    if name.startswith(COUNTED):
        kind, _, written = name.partition(":")
        count = written.replace("_", "")
        if not count.isdecimal() or int(count) < 1:
            raise DataError(f"data.source {name!r}: {kind}:NUMBER has a number from 1 up")
        if kind in SETS:
            return PicturesOfKinds(Conditions(config), rows, SETS[kind], int(count))
        return Shapes(Conditions(config), rows, int(count))
    return Collection(Conditions(config), rows, Files(name))
