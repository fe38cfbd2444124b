"""IDX files, the form of MNIST and its kin: a file of grey images, and beside it one of their labels; also as .gz."""

import gzip
import re
import struct
import zlib
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, cast

import numpy as np

from ddm_ray.data.images import png
from ddm_ray.data.sources.chunks import Encoded, EncodedChunk, Listing, Unit, chunked, rows_of_a_part
from ddm_ray.data.sources.collection import Collection, Format
from ddm_ray.data.sources.conditions import Conditions
from ddm_ray.data.sources.files import Files, as_source_error
from ddm_ray.errors import DataError

_NAME = re.compile(r"(.*)(images|labels)([-.])idx([13])([-.]ubyte)(\.gz)?")
MOST_SIDE = 4096
"""Pixels of an image along a side, at most."""
MOST_ROWS = 2**27
"""Images of a file, at most: their labels are in memory at once."""
_BYTES = 8
"""The header's number for values of a byte."""


class Idx(Format):
    """See Format: files named train-images-idx3-ubyte.gz, train-labels.idx1-ubyte and so on."""

    plural = "IDX files of images"
    about = "IDX files as MNIST's: of images, each with one of their labels beside it; also as .gz"

    def owns(self, path: str) -> bool:
        """See Format; a file of images or labels."""
        return _NAME.fullmatch(path.rpartition("/")[2]) is not None

    def units(self, sizes: Mapping[str, int], chunk_rows: int) -> tuple[Unit, ...]:
        """A unit for each file of images, with its labels where these are there."""
        each_file = []
        for path, size in sizes.items():
            labels = _labels_of(path)
            if labels is not None:
                beside = next((each for each in labels if each in sizes), None)
                files = (path,) if beside is None else (path, beside)
                each_file.append(Unit(path, size, files, tuple(sizes[file] for file in files)))
        return tuple(each_file)

    def list(self, source: Collection, sizes: Mapping[str, int]) -> Listing:
        """See Format; all headers are read."""
        units = self.units(sizes, source.chunk_rows)
        rows = sum(self.count(source, unit) for unit in units)
        return Listing(units, rows=rows, chunk_rows=min(source.chunk_rows, rows_of_a_part(rows)))

    def count(self, source: Collection, unit: Unit) -> int:
        """Images of a file, by its header. Raises DataError, StorageError."""
        with _opened(source.files, unit.files[0]) as stream:
            return _shape(stream, source.files.where(unit.files[0]), 3)[0]

    def read(self, source: Collection, unit: Unit, skip: Container[int]) -> Iterator[EncodedChunk]:
        """See Format. Raises DataError where images or their labels are cut off, or are something else."""
        files = source.files
        if source.conditions.captions:
            raise DataError(f"{files.where(unit.files[0])}: has no captions; give WebDataset tars or parquet files")
        for path, size in zip(unit.files, unit.sizes, strict=True):
            files.check(path, size)
        return chunked(_rows(files, unit, source.conditions), source.chunk_rows, skip)


def _rows(files: Files, unit: Unit, conditions: Conditions) -> Iterator[tuple[Encoded, float]]:
    path, where = unit.files[0], files.where(unit.files[0])
    with _opened(files, path) as stream:
        count, height, width = _shape(stream, where, 3)
        labels = _labels(files, unit, count) if conditions.needed else None
        for index in range(count):
            pixels = _exactly(stream, height * width, f"{where}: ends after {index} of {count} images")
            image = png(np.frombuffer(pixels, np.uint8).reshape(height, width), compression=1)
            row_id = f"{path}/{index:0{len(str(count))}d}"
            try:
                row = Encoded(row_id, image, conditions.of(None if labels is None else labels[index]))
            except ValueError as problem:
                row = Encoded(row_id, None, None, str(problem))
            yield row, (index + 1) / count
        _require_end(stream, where)


def _labels(files: Files, unit: Unit, count: int) -> bytes:
    if len(unit.files) == 1:
        expected = next(iter(_labels_of(unit.files[0]) or ()))
        name = expected.rpartition("/")[2]
        raise DataError(f"{files.where(unit.files[0])}: its labels, {name}, aren't among the files of data.source")
    where = files.where(unit.files[1])
    with _opened(files, unit.files[1]) as stream:
        (labels,) = _shape(stream, where, 1)
        if labels != count:
            raise DataError(f"{where}: has {labels} labels, for {count} images")
        read = _exactly(stream, count, f"{where}: has fewer than {count} labels")
        _require_end(stream, where)
    return read


def _labels_of(path: str) -> tuple[str, str] | None:
    """Names that the labels of a file of images may have; None for other files."""
    folder, slash, name = path.rpartition("/")
    match = _NAME.fullmatch(name)
    if match is None or match[2] != "images":
        return None
    plain = f"{folder}{slash}{match[1]}labels{match[3]}idx1{match[5]}"
    packed = f"{plain}.gz"
    return (packed, plain) if match[6] else (plain, packed)


@contextmanager
def _opened(files: Files, path: str) -> Iterator[IO[bytes]]:
    """A stream of a file's bytes, unpacked. What isn't gzip, or ends within it, is a DataError."""
    where = files.where(path)
    with as_source_error(where), files.open(path) as stream:
        try:
            if not path.lower().endswith(".gz"):
                yield cast(IO[bytes], stream)
            else:
                with gzip.GzipFile(fileobj=cast(IO[bytes], stream)) as unpacked:
                    yield cast(IO[bytes], unpacked)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{where}: is cut off, or isn't what its name says: {error}") from None


def _shape(stream: IO[bytes], where: str, dimensions: int) -> tuple[int, ...]:
    """Lengths by a header: two zero bytes, the kind of values, the number of dimensions, and four bytes for each."""
    head = _exactly(stream, 4 + 4 * dimensions, f"{where}: has no header of an IDX file")
    zero, kind, stated, *lengths = struct.unpack(f">HBB{dimensions}I", head)
    if zero or kind != _BYTES or stated != dimensions:
        raise DataError(f"{where}: isn't an IDX file of bytes in {dimensions} dimensions")
    if any(not 0 < side <= MOST_SIDE for side in lengths[1:]):
        raise DataError(f"{where}: has images of {' x '.join(map(str, lengths[1:]))} pixels, not of 1 to {MOST_SIDE}")
    if lengths[0] > MOST_ROWS:
        raise DataError(f"{where}: has {lengths[0]} rows, more than {MOST_ROWS}; split it")
    return tuple(lengths)


def _exactly(stream: IO[bytes], size: int, problem: str) -> bytes:
    """Read so many bytes. Raises DataError, with the problem, where the stream ends before."""
    pieces = list[bytes]()
    while size and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    if size:
        raise DataError(problem)
    return b"".join(pieces)


def _require_end(stream: IO[bytes], where: str) -> None:
    if stream.read(1):
        raise DataError(f"{where}: goes on after what its header tells of")
