"""The terms that every source speaks in: units of work, chunks of encoded rows, and how a source is read."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, Self

from ddm_ray.config import DataConfig
from ddm_ray.data.sharded.work import CHUNK_BYTES, Chunk

CHUNK_FILE_BYTES = 128 * 2**20
"""Encoded images, as they are in the source, at which a chunk is full whatever its number of rows."""
IMAGE_BYTES = 256 * 2**20
"""Maximum size of an image as it is in the source; a larger one isn't read."""
MIN_ROWS, MAX_ROWS = 32, 4096
PARTS, LEAST_ROWS = 64, 128
"""Parts that a source is read in at least, and rows in each from which on it is: a kill costs what is under way."""


@dataclass(frozen=True)
class Unit:
    """Work that one task reads from beginning to end: a tar, a parquet file, a range of a folder's files.

    `bytes`: its size, for progress. `files`: paths below the source's root that it reads, with their `sizes` in bytes
    when they were listed.
    """

    key: str
    bytes: int
    files: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """A row as it is in the source: the image's file, and a label 0..num_classes-1 or a caption.

    `id` is unique in the source. `problem`: why the row can't be used, if it can't. `scene`: rows of one are either
    held out together or not at all; none: each by itself.
    """

    id: str
    image: bytes | None
    condition: int | str | None
    problem: str | None = None
    scene: str | None = None


EncodedChunk = Chunk[list[Encoded]]


@dataclass(frozen=True)
class Listing:
    """A source's units, always in the same order.

    `classes`: names that the source has for classes which the run only counts, by label; none: it has none.
    `ignored`: numbers of files that no unit reads, being of another kind, by the endings of their names. `numbered`:
    names of the classes that numbers in the source stand for; none: they are labels. `rows`: their number, usable or
    not; None where a listing doesn't tell. `chunk_rows`: rows of a chunk at most, so that there are some; None: as many
    as the source has.
    """

    units: tuple[Unit, ...]
    classes: tuple[str, ...] | None = None
    ignored: dict[str, int] = field(default_factory=dict)
    numbered: tuple[str, ...] | None = None
    rows: int | None = None
    chunk_rows: int | None = None


class Source(Protocol):
    """Encoded images with conditions; can be pickled, and costs nothing to open on any machine."""

    def list(self) -> Listing:
        """List all units. Raises DataError, StorageError."""
        ...

    def planned(
        self,
        chunk_rows: int,
        classes: tuple[str, ...] | None,
        by_values: bool = True,
        numbered: tuple[str, ...] | None = None,
    ) -> Self:
        """The source as a plan has it: read in chunks of `chunk_rows` rows, with a listing's `classes` and `numbered`.

        Not `by_values`: chunks of parquet files end after so many rows, however large the values are.
        """
        ...

    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[EncodedChunk]:
        """The unit's chunks but those in `skip`, in order; the same every time, whatever is skipped.

        A unit without rows has one empty chunk. An image file that is gone or changed since it was listed is a row
        with a problem. Raises DataError if a tar or parquet file is, or can't be read, or if the source as a whole is
        gone; StorageError.
        """
        ...


UNREAD = Encoded("", None, None)
"""Stands for a row of a chunk that is skipped."""
_BEFORE_THE_END = 1 - 2**-20


def chunk_rows(config: DataConfig) -> int:
    """Rows whose decoded pixels fill CHUNK_BYTES, between MIN_ROWS and MAX_ROWS; a power of two."""
    num_channels, height, width = config.decoded_shape
    rows = max(1, CHUNK_BYTES // (num_channels * height * width))
    return min(MAX_ROWS, max(MIN_ROWS, 1 << (rows.bit_length() - 1)))


def rows_of_a_part(rows: int) -> int:
    """Rows of a chunk, of about so many in all, at which there are PARTS chunks, LEAST_ROWS if they are few."""
    return max(LEAST_ROWS, rows // PARTS)


def cuts(sizes: Iterable[int], max_rows: int) -> Iterator[int]:
    """Ends of chunks of rows of these sizes in bytes: after `max_rows` rows, or where they fill CHUNK_FILE_BYTES."""
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
    """Rows, each with the share of the unit that is read after it, as chunks but those in `skip`.

    They end as `cuts` says, or where they fill `max_bytes` in place of CHUNK_FILE_BYTES.
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
