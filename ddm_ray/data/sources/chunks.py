"""What every source speaks of: units of work, chunks of encoded rows, and how a source is read."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ddm_ray.config import DataConfig

CHUNK_BYTES = 64 * 2**20
CHUNK_FILE_BYTES = 128 * 2**20
"""Encoded images, as they are in the source, at which a chunk is full whatever its number of rows."""
FEWEST_ROWS = 32
MOST_ROWS = 4096


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

    `id` is unique in the source. `problem`: why the row can't be used, if it can't.
    """

    id: str
    image: bytes | None
    condition: int | str | None
    problem: str | None = None


@dataclass(frozen=True)
class Chunk:
    """Rows of a unit, numbered from 0. `until`: the share of the unit that is read by now, 1.0 for the last alone."""

    number: int
    rows: list[Encoded]
    until: float


class Source(Protocol):
    """Encoded images with conditions; can be pickled, and costs nothing to open on any machine."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names that `units` found by looking, for `open_source` elsewhere; none: those of the configuration."""
        ...

    @property
    def ignored(self) -> dict[str, int]:
        """How many files `units` left out because by their names' endings they are of another kind, by ending."""
        ...

    def units(self) -> list[Unit]:
        """All units, always in the same order. Raises DataError, StorageError."""
        ...

    def read(self, unit: Unit, skip: Container[int] = ()) -> Iterator[Chunk]:
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
    """Rows whose decoded pixels fill 64 MiB, between 32 and 4096; a power of two."""
    num_channels, height, width = config.pixel_shape
    rows = max(1, CHUNK_BYTES // (num_channels * height * width))
    return min(MOST_ROWS, max(FEWEST_ROWS, 1 << (rows.bit_length() - 1)))


def cuts(sizes: Iterable[int], most_rows: int) -> Iterator[int]:
    """Where chunks of rows of so many bytes end: after `most_rows` rows, or where they fill CHUNK_FILE_BYTES."""
    rows, total, place = 0, 0, 0
    for place, size in enumerate(sizes, 1):
        rows, total = rows + 1, total + size
        if rows == most_rows or total >= CHUNK_FILE_BYTES:
            yield place
            rows, total = 0, 0
    if rows:
        yield place


def chunked(
    rows: Iterable[tuple[Encoded, float]], most_rows: int, skip: Container[int], by_bytes: bool = True
) -> Iterator[Chunk]:
    """Rows, each with the share of the unit that is read after it, as chunks but those in `skip`.

    They end as `cuts` says; with not `by_bytes` after `most_rows` rows.
    """
    number, held, until, total = 0, list[Encoded](), 0.0, 0
    for row, share in rows:
        if len(held) == most_rows or total >= CHUNK_FILE_BYTES:
            if number not in skip:
                yield Chunk(number, held, min(until, _BEFORE_THE_END))
            number, held, total = number + 1, [], 0
        total += len(row.image or b"") if by_bytes else 0
        held.append(row if number not in skip else UNREAD)
        until = share
    if number not in skip:
        yield Chunk(number, held, 1.0)
