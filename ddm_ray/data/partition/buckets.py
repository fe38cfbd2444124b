"""Rows sorted into buckets on a local disk, by one pass or two: few of them come to any bucket at a time."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from ddm_ray.data.scratch import as_scratch_error

ONE_PASS = 2048
"""Buckets up to which rows go to their own at once. Of more, an append would be of a row or two, and cost ten times as
much as one of hundreds: rows go to a bin of many buckets first, and from there to their own."""
BIN, BUCKET = "bin", "bucket"


class RowBuckets:
    """Rows of a schema in `count` buckets, numbered from 0; a folder that is there takes the bytes of all.

    Twice `flush_bytes` are held at the most, in two passes four times as many. Raises StorageError where the folder
    refuses.
    """

    def __init__(self, folder: Path, schema: pa.Schema, count: int, flush_bytes: int):
        self._folder, self._schema = folder, schema
        self._per_bin = 1 if count <= ONE_PASS else math.isqrt(count)
        self._first = BUCKET if self._per_bin == 1 else BIN
        self._flush_bytes = flush_bytes if self._first == BUCKET else 4 * flush_bytes
        self._pending: list[tuple[pa.Table, np.ndarray]] = []
        self._pending_bytes = 0

    def add(self, table: pa.Table, bucket_N: np.ndarray) -> None:
        """Add rows, each to its bucket."""
        if self._first == BIN:
            table = table.append_column(BUCKET, pa.array(bucket_N))
        self._append(table, bucket_N // self._per_bin, self._first)

    def take(self, bucket: int) -> pa.Table:
        """The rows of a bucket in any order, which are gone then. Nothing is added once any was taken."""
        self._flush(self._first)
        with as_scratch_error(self._folder):
            crowd = self._path(BIN, bucket // self._per_bin)
            if self._first == BIN and crowd.exists():
                for table in _read(crowd):
                    self._append(table.drop_columns(BUCKET), table[BUCKET].to_numpy(), BUCKET)
                self._flush(BUCKET)
                crowd.unlink()
            path = self._path(BUCKET, bucket)
            table = pa.concat_tables([self._schema.empty_table(), *(_read(path) if path.exists() else ())])
            path.unlink(missing_ok=True)
            return table

    def _append(self, table: pa.Table, place_N: np.ndarray, kind: str) -> None:
        """Append rows, each to the file of a kind and number."""
        self._pending.append((table, place_N))
        self._pending_bytes += table.nbytes
        if self._pending_bytes >= self._flush_bytes:
            self._flush(kind)

    def _flush(self, kind: str) -> None:
        """Append what is pending to files of a kind: few rows at a time to many of them, none of which is kept open."""
        if not self._pending:
            return
        place_N = np.concatenate([places for _, places in self._pending])
        table = pa.concat_tables(table for table, _ in self._pending).combine_chunks()
        self._pending.clear()
        self._pending_bytes = 0
        order = np.argsort(place_N, kind="stable")
        table, place_N = table.take(pa.array(order)), place_N[order]
        starts = np.flatnonzero(np.diff(place_N, prepend=-1))
        with as_scratch_error(self._folder):
            for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
                path = self._path(kind, int(place_N[start]))
                with path.open("ab") as file, pa.ipc.new_stream(file, table.schema) as stream:
                    stream.write_table(table.slice(start, end - start))

    def _path(self, kind: str, number: int) -> Path:
        return self._folder / f"{kind}-{number:06d}.arrow"


def _read(path: Path) -> Iterator[pa.Table]:
    """The tables that were appended to a file, one after the other."""
    with pa.OSFile(str(path)) as file:
        while file.tell() < file.size():
            yield pa.ipc.open_stream(file).read_all()
