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
BUCKET = "bucket"


class RowBuckets:
    """Rows of a schema in `count` buckets, numbered from 0; a folder that is there takes the bytes of all.

    So many bytes as `flush_bytes` are held, of two passes four times as many. Raises StorageError where the folder
    refuses.
    """

    def __init__(self, folder: Path, schema: pa.Schema, count: int, flush_bytes: int):
        self._folder, self._schema = folder, schema
        self._per_bin = 1 if count <= ONE_PASS else math.isqrt(count)
        self._flush_bytes = flush_bytes if self._per_bin == 1 else 4 * flush_bytes
        self._pending: dict[Path, list[pa.Table]] = {}
        self._pending_bytes = 0

    def add(self, table: pa.Table, bucket_N: np.ndarray) -> None:
        """Add rows, each to its bucket."""
        if self._per_bin > 1:
            table = table.append_column(BUCKET, pa.array(bucket_N))
        self._append(table, bucket_N // self._per_bin, "bin" if self._per_bin > 1 else BUCKET)

    def take(self, bucket: int) -> pa.Table:
        """The rows of a bucket in any order, which are gone then. Nothing is added once any was taken."""
        self._flush()
        with as_scratch_error(self._folder):
            crowd = self._path("bin", bucket // self._per_bin)
            if crowd.exists():
                for table in _read(crowd):
                    self._append(table.drop_columns(BUCKET), table[BUCKET].to_numpy(), BUCKET)
                self._flush()
                crowd.unlink()
            path = self._path(BUCKET, bucket)
            table = pa.concat_tables([self._schema.empty_table(), *(_read(path) if path.exists() else ())])
            path.unlink(missing_ok=True)
            return table

    def _append(self, table: pa.Table, place_N: np.ndarray, kind: str) -> None:
        """Append rows, each to the file of a kind and number."""
        order = np.argsort(place_N, kind="stable")
        table, place_N = table.take(pa.array(order)), place_N[order]
        starts = np.flatnonzero(np.diff(place_N, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            rows = table.slice(start, end - start)
            self._pending.setdefault(self._path(kind, int(place_N[start])), []).append(rows)
        self._pending_bytes += table.nbytes
        if self._pending_bytes >= self._flush_bytes:
            self._flush()

    def _flush(self) -> None:
        """Append what is pending: few rows at a time to many files, none of them kept open."""
        with as_scratch_error(self._folder):
            for path, tables in self._pending.items():
                with path.open("ab") as file, pa.ipc.new_stream(file, tables[0].schema) as stream:
                    for table in tables:
                        stream.write_table(table)
        self._pending.clear()
        self._pending_bytes = 0

    def _path(self, kind: str, number: int) -> Path:
        return self._folder / f"{kind}-{number:06d}.arrow"


def _read(path: Path) -> Iterator[pa.Table]:
    """The tables that were appended to a file, one after the other."""
    with pa.OSFile(str(path)) as file:
        while file.tell() < file.size():
            yield pa.ipc.open_stream(file).read_all()
