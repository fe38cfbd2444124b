"""Partition on a Ray cluster, by Ray Data: passes over the parts by tasks, and the shards' files by its shuffle."""

import base64
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import ray
import ray.data

from ddm_ray.data import OnProgress
from ddm_ray.data.partition.assignment import RowClusters
from ddm_ray.data.partition.clustering import RowsReader
from ddm_ray.data.partition.file_plan import FilePlan, bytes_of_rows, in_order, write_rows
from ddm_ray.data.partition.made_files import MadeFile, MadeFiles
from ddm_ray.data.partition.tally import Tally
from ddm_ray.data.schema import TRAIN, shard_file_schema
from ddm_ray.data.scratch import as_scratch_error
from ddm_ray.data.sharded.ray_data import TASKS_PER_CORE, keep_quiet, to_row, values_of
from ddm_ray.errors import DDMError
from ddm_ray.storage.graph import shard
from ddm_ray.storage.manifest import FileRecord
from ddm_ray.storage.run import Run

T = TypeVar("T")
PLACE, FAILED = "place", -1
BLOCK_BYTES, SHUFFLED_BYTES = 2**20, 2**28
"""Bytes of results that a task gives at once, and of rows that one sorts by their files at a time."""


@dataclass(frozen=True)
class RayPasses:
    """Passes and shards on the Ray that `session` starts or joins; none: Ray is initialised."""

    session: Callable[[], AbstractContextManager[object]] = nullcontext

    def each(
        self, rows: RowsReader, make: Callable[[pa.Table], T], columns: list[str] | None, on_progress: OnProgress
    ) -> Iterator[T]:
        """An `EachPart`. Raises RayError for what fails in Ray."""
        made = _parts(rows, partial(_make_each, rows=rows, make=make, columns=columns))
        made.context.target_max_block_size = BLOCK_BYTES
        for number, (num_rows, value) in enumerate(values_of(made, rows.run.url), 1):
            yield value
            on_progress(number / len(rows.names), f"{num_rows:,} rows of part {number:,}")

    def write(
        self, rows: RowsReader, clusters: RowClusters, plan: FilePlan, made: MadeFiles, on_progress: OnProgress
    ) -> dict[int, MadeFile]:
        """Write the files of a plan that have no record; all of them, by their places. Raises RayError, StorageError.

        A file's rows come together on one node.
        """
        files = made.find(plan.files)
        missing = frozenset(file.place for file in plan.files) - files.keys()
        if not missing:
            return files
        placed = _parts(rows, partial(_place, rows=rows, clusters=clusters, plan=plan, missing=missing))
        placed.context.shuffle_input_batch_bytes = SHUFFLED_BYTES
        placed.context.shuffle_compression = "none"  # of latents there is nothing to be gained
        # Twice as many ranges of hashes as files, so that few have several files, which a task would hold at once.
        written = placed.groupby(PLACE, num_partitions=2 * len(missing)).map_groups(
            partial(_write, run=rows.run, plan=plan, made=made), batch_format="pyarrow", num_cpus=1
        )
        for number, file in enumerate(values_of(written, rows.run.url), 1):
            files[file.file.place] = file
            on_progress(number / len(missing), f"{number:,} of {len(missing):,} files")
        return files


def _parts(rows: RowsReader, make: Callable[[pa.Table], Iterator[pa.Table]]) -> ray.data.Dataset:
    """Have tasks make a dataset of the rows' parts, by their names."""
    keep_quiet()
    cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
    names = [{"name": name} for name in rows.names]
    dataset = ray.data.from_items(names, override_num_blocks=max(1, min(len(names), TASKS_PER_CORE * cores)))
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    return dataset.map_batches(
        make, batch_size=None, batch_format="pyarrow", num_cpus=1, compute=ray.data.TaskPoolStrategy(cores)
    )


def _make_each(
    names: pa.Table, rows: RowsReader, make: Callable[[pa.Table], Any], columns: list[str] | None
) -> Iterator[pa.Table]:
    """Rows of a part's number of rows and what is made of it. A DDMError ends them, as such a row."""
    try:
        for table in rows.parts(columns, lambda *_: None, names["name"].to_pylist()):
            yield to_row((table.num_rows, make(table)))
    except DDMError as error:
        yield to_row(error)


def _place(
    names: pa.Table, rows: RowsReader, clusters: RowClusters, plan: FilePlan, missing: frozenset[int]
) -> Iterator[pa.Table]:
    """The rows that missing files need, each with its file's place. A DDMError ends them, as a row without one."""
    schema = shard_file_schema(rows.run.config.data).append(pa.field(PLACE, pa.int64()))
    try:
        for table in rows.parts(None, lambda *_: None, names["name"].to_pylist()):
            placed, place_N = plan.placed(table, clusters(table))
            placed = placed.append_column(PLACE, pa.array(place_N, pa.int64()))
            yield placed.filter(pa.array([place in missing for place in place_N.tolist()], pa.bool_()))
    except DDMError as error:
        columns = {"id": [base64.b64encode(pickle.dumps(error)).decode()], PLACE: [FAILED]}
        yield pa.table([columns.get(name, [None]) for name in schema.names], schema=schema)


def _write(group: pa.Table, run: Run, plan: FilePlan, made: MadeFiles) -> pa.Table:
    """Write the file of all rows of one place to storage, and its record; a row of that."""
    place = group[PLACE][0].as_py()
    if place == FAILED:
        return to_row(pickle.loads(base64.b64decode(group["id"][0].as_py())))
    try:
        return to_row(_write_file(group.drop_columns(PLACE), place, run, plan, made))
    except DDMError as error:
        return to_row(error)


def _write_file(rows: pa.Table, place: int, run: Run, plan: FilePlan, made: MadeFiles) -> MadeFile:
    file, tally = plan.files[place], Tally.none(run.config.data)
    with tempfile.TemporaryDirectory(prefix="ddm-shard-") as folder, as_scratch_error(Path(folder)):
        path = Path(folder, "file.parquet")
        mean_bytes = int(bytes_of_rows(rows).sum()) / rows.num_rows
        ordered = in_order(rows.combine_chunks())
        write_rows(
            path, [ordered], shard_file_schema(run.config.data), mean_bytes, tally if file.split == TRAIN else None
        )
        record = FileRecord.of_file(path)
        run.store.write(f"{shard(file.cluster)}/{file.name(run.generation)}", path)
    written = MadeFile(file, record, rows.num_rows, tally)
    made.put(written)
    return written
