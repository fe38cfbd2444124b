"""What data.py measures of sorting: rows to very many buckets, in two passes beside one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from claims import Report, interleaved
from data_compute import add, quotients

from ddm_ray.data.partition import buckets
from ddm_ray.data.scratch import scratch_folder

ROW_BYTES = 8200  # of latents of 256 pixels
PART_ROWS = 512
# Of a hundred million such rows a flush has .1 row a bucket: as small a part is held here of far fewer rows.
ROWS_A_BUCKET, FLUSHED_A_BUCKET = 100, 0.1
MOST_SORTING = 0.5


def measure_sorting(num_rows: int, repeats: int, folder: Path, report: Report) -> None:
    """Time of all rows into buckets and out of them, in two passes over that in one."""
    count = max(buckets.ONE_PASS + 1, num_rows // ROWS_A_BUCKET)
    schema = pa.schema([("id", pa.string()), ("data", pa.binary(ROW_BYTES))])
    bucket_N = np.random.default_rng(0).integers(0, count, num_rows)
    content = pa.py_buffer(np.random.default_rng(1).bytes(ROW_BYTES * PART_ROWS))

    def sort(one_pass: int) -> None:
        default, buckets.ONE_PASS = buckets.ONE_PASS, one_pass
        with scratch_folder(str(folder)) as place:
            rows = buckets.RowBuckets(place, schema, count, int(count * FLUSHED_A_BUCKET * ROW_BYTES))
            for first in range(0, num_rows, PART_ROWS):
                part_N = bucket_N[first : first + PART_ROWS]
                data = pa.FixedSizeBinaryArray.from_buffers(pa.binary(ROW_BYTES), len(part_N), [None, content])
                ids = [f"row/{first + number:09d}" for number in range(len(part_N))]
                rows.add(pa.table({"id": ids, "data": data}, schema=schema), part_N)
            assert sum(len(rows.take(bucket)) for bucket in range(count)) == num_rows
        buckets.ONE_PASS = default

    sides: dict[str, Callable[[], object]] = {"one": partial(sort, count), "two": partial(sort, buckets.ONE_PASS)}
    seconds = interleaved(sides, repeats, "cpu")
    each = [1e6 * value / num_rows for value in seconds["one"]]
    add(report, f"{num_rows} rows of {ROW_BYTES} bytes to {count} buckets, one pass: time a row", each, "us")
    add(report, "two passes: time", quotients(seconds["two"], seconds["one"]), "x one pass", MOST_SORTING)
