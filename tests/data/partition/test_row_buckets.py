"""Rows in buckets on a disk: all come out where they belong, and many are written at a time."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ddm_ray.data.partition.buckets import ONE_PASS, RowBuckets

SCHEMA = pa.schema([("row", pa.int64()), ("data", pa.binary(92))])
ROW_BYTES = 100
ROWS = 60_000


def filled(folder: Path, count: int, flush_rows: int) -> tuple[RowBuckets, np.ndarray]:
    """Buckets with all rows, and where each belongs."""
    bucket_N = np.random.default_rng(0).integers(0, count, ROWS)
    buckets = RowBuckets(folder, SCHEMA, count, flush_rows * ROW_BYTES)
    for row_N in np.arange(ROWS).reshape(100, -1):
        table = pa.table({"row": row_N, "data": pa.array([b"." * 92] * len(row_N), SCHEMA.field(1).type)})
        buckets.add(table, bucket_N[row_N])
    return buckets, bucket_N


def rows_an_append(files: Iterable[Path]) -> float:
    """Mean number of rows that were appended at a time."""
    rows, appends = 0, 0
    for path in files:
        with pa.OSFile(str(path)) as file:
            while file.tell() < file.size():
                rows, appends = rows + len(pa.ipc.open_stream(file).read_all()), appends + 1
    return rows / appends


@pytest.mark.parametrize("count", [1, 7, ONE_PASS, ONE_PASS + 1, 10_000])
def test_a_bucket_has_its_rows_and_no_others(tmp_path: Path, count: int) -> None:
    buckets, bucket_N = filled(tmp_path, count, 1000)
    every = [buckets.take(bucket) for bucket in range(count)]
    assert sum(map(len, every)) == ROWS
    for bucket, table in enumerate(every):
        assert table.schema == SCHEMA
        assert sorted(table["row"].to_pylist()) == np.flatnonzero(bucket_N == bucket).tolist()
    assert not [*tmp_path.iterdir()]


def test_of_many_buckets_rows_are_appended_together(tmp_path: Path) -> None:
    """To 10,000 buckets, of 1,000 rows at a time one each would come: forty times as many go to a bin."""
    buckets, _ = filled(tmp_path, 10_000, 1000)
    bins = [*tmp_path.glob("bin-*.arrow")]
    assert [*tmp_path.iterdir()] == bins and len(bins) == 100
    assert rows_an_append(bins) == pytest.approx(40, rel=0.1)
    buckets.take(0)
    own = [*tmp_path.glob("bucket-*.arrow")]
    assert rows_an_append(own) == pytest.approx(6, rel=0.2), "all of a bucket at once"
    assert len([*tmp_path.glob("bin-*.arrow")]) == 99


def test_few_buckets_are_written_once(tmp_path: Path) -> None:
    filled(tmp_path, ONE_PASS, 20_000)
    assert not [*tmp_path.glob("bin-*.arrow")]
