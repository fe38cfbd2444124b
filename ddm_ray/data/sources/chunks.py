"""The base class of every source: units of work, chunks of encoded rows, and how a source is read."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from ddm_ray.config import DataConfig
from ddm_ray.data.sharded.work import CHUNK_BYTES, Chunk
from ddm_ray.data.sources.conditions import Conditions

CHUNK_FILE_BYTES = 128 * 2**20
"""A chunk is full at this size of its encoded images, whatever its number of rows."""
IMAGE_BYTES = 256 * 2**20
"""Maximum size of an encoded image. Larger ones aren't read."""
MIN_ROWS, MAX_ROWS = 32, 4096
PARTS, MIN_PART_ROWS = 64, 128
"""Minimum number of parts that a source is read in, if each has MIN_PART_ROWS rows: a kill loses the current parts."""


@dataclass(frozen=True)
class Unit:
    """Work that one task reads from beginning to end: a tar, a parquet file, a range of a folder's files.

    `bytes`: its size, for progress. `files`: paths below the source's root that it reads, with their `sizes` in bytes
    at the time of listing.
    """

    key: str
    bytes: int
    files: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """A row as the source has it: the image's file, and a label 0..num_classes-1 or a caption.

    `id` is unique in the source. `problem`: the reason why the row can't be used, if it can't. `scene`: rows of one
    scene are either all held out or none is; None: the row is its own scene. `remark`: on what is lost.
    """

    id: str
    image: bytes | None
    condition: int | str | None
    problem: str | None = None
    scene: str | None = None
    remark: str | None = None


EncodedChunk = Chunk[list[Encoded]]


@dataclass(frozen=True)
class Listing:
    """A source's units, always in the same order.

    `classes`: the source's names, by label, for classes that the run only counts; None: it has none. `ignored`: numbers
    of files that no unit reads, by the extension of other kinds, or by why they are skipped. `numbered`: names of the
    classes that numbers in the source stand for; None: numbers are labels. `rows`: number of rows, usable or not; None:
    unknown from a listing. `chunk_rows`: maximum rows of a chunk, so that a small source has several; None: no such
    maximum.
    """

    units: tuple[Unit, ...]
    classes: tuple[str, ...] | None = None
    ignored: dict[str, int] = field(default_factory=dict)
    numbered: tuple[str, ...] | None = None
    rows: int | None = None
    chunk_rows: int | None = None


@dataclass(frozen=True)
class Source(ABC):
    """Encoded images with conditions, in chunks of `chunk_rows` rows.

    Can be pickled, and opened on any machine without access to storage.
    """

    conditions: Conditions
    chunk_rows: int

    def planned(
        self, chunk_rows: int, classes: tuple[str, ...] | None, numbered: tuple[str, ...] | None = None
    ) -> Self:
        """The source as a plan reads it: in chunks of `chunk_rows` rows, with a listing's `classes` and `numbered`."""
        conditions = replace(self.conditions, classes=classes, numbered=numbered)
        return replace(self, chunk_rows=chunk_rows, conditions=conditions)

    @abstractmethod
    def list(self) -> Listing:
        """List all units. Raises DataError, StorageError."""

    @abstractmethod
    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[EncodedChunk]:
        """Yield the unit's chunks except those in `skip`, in order; always the same ones.

        A unit without rows has one empty chunk. An image file that is missing, or has changed since it was listed,
        gives a row with a problem. Raises DataError for such a tar or parquet file, for one that can't be read, and if
        the whole source is missing; StorageError.
        """


UNREAD = Encoded("", None, None)
"""Placeholder for a row of a skipped chunk."""
_BEFORE_THE_END = 1 - 2**-20


def chunk_rows(config: DataConfig) -> int:
    """Rows with decoded pixels that fill CHUNK_BYTES, between MIN_ROWS and MAX_ROWS; a power of two."""
    num_channels, height, width = config.decoded_shape
    rows = max(1, CHUNK_BYTES // (num_channels * height * width))
    return min(MAX_ROWS, max(MIN_ROWS, 1 << (rows.bit_length() - 1)))


def rows_of_a_part(rows: int) -> int:
    """Rows per chunk that split about `rows` rows into PARTS chunks, but at least MIN_PART_ROWS."""
    return max(MIN_PART_ROWS, rows // PARTS)


def cuts(sizes: Iterable[int], max_rows: int) -> Iterator[int]:
    """Yield the ends of chunks of rows of these sizes: after `max_rows` rows, or once CHUNK_FILE_BYTES are full."""
    rows, total, place = 0, 0, 0
    for place, size in enumerate(sizes, 1):
        rows, total = rows + 1, total + size
        if rows == max_rows or total >= CHUNK_FILE_BYTES:
            yield place
            rows, total = 0, 0
    if rows:
        yield place


def chunked(
    rows: Iterable[tuple[Encoded, float]], max_rows: int, skip: Container[int], max_bytes: float | None = None
) -> Iterator[EncodedChunk]:
    """Group rows, each with the share of the unit read after it, into chunks; yields those that aren't in `skip`.

    Chunks end as in `cuts`, with `max_bytes` in place of CHUNK_FILE_BYTES if it is given.
    """
    max_bytes = CHUNK_FILE_BYTES if max_bytes is None else max_bytes
    number, held, until, total = 0, list[Encoded](), 0.0, 0
    for row, share in rows:
        if len(held) == max_rows or total >= max_bytes:
            if number not in skip:
                yield Chunk(number, held, min(until, _BEFORE_THE_END))
            number, held, total = number + 1, [], 0
        total += len(row.image or b"")
        held.append(row if number not in skip else UNREAD)
        until = share
    if number not in skip:
        yield Chunk(number, held, 1.0)
