"""Partition on a Ray cluster: passes over the parts by Ray Data, and the shards' files by an exchange between tasks.

One kind of task splits the rows of some parts by groups of files; the other writes a group's files from the pieces of
all split tasks. Ray keeps the pieces on the machine that split them, spills them to its disk if memory is short, and
splits again what a dead machine held. Ray Data's shuffle does the same, but starts two more kinds of processes on each
machine, and keeps two more copies of every row in its object store, which took several times as long.
"""

import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import ray
import ray.data

from ddm_ray.data import OnProgress, no_progress, phase
from ddm_ray.data.partition.clustering import RowsReader, pace
from ddm_ray.data.partition.file_plan import ShardFile
from ddm_ray.data.partition.made_files import MadeFile
from ddm_ray.data.partition.passes import FileWork
from ddm_ray.data.scratch import OTHER_SCRATCH
from ddm_ray.data.sharded.ray_data import TASKS_PER_CORE, errors_of_ray, keep_quiet, made_values, to_row
from ddm_ray.errors import DDMError, RayError, StorageError
from ddm_ray.spelling import amount

T = TypeVar("T")
BLOCK_BYTES = 2**20
"""Bytes of results that a task returns at a time."""
MIN_TASKS_PER_CORE, MIN_PIECE_BYTES = 4, 2**18
"""Minimum tasks of each kind per core, so that all cores work; fewer if a piece would get smaller than
MIN_PIECE_BYTES, since Ray sends small objects through the driver."""
MAX_GROUPS = 1024
"""Maximum groups, then they get larger: the driver keeps about a KB for each piece."""
WRITES_PER_CORE = 2
"""Write tasks per core that run, or wait for their rows, at a time."""
RETRIES = 10
"""Retries of a task after its process or machine dies, also to make its lost results again."""
STALL_SECONDS = 300.0
STALLED = "no task has ended for minutes; see that Ray's machines have free space where they spill objects"
Groups = Sequence[Sequence[ShardFile]]
CommonWork: TypeAlias = "ray.ObjectRef[FileWork]"
Piece: TypeAlias = "ray.ObjectRef[dict[int, pa.Table]]"
"""The rows that a task has split for a group, by the places of their files."""


@dataclass(frozen=True)
class RayPasses:
    """The executor on the Ray that `session` starts or joins; without one, Ray is already initialised.

    `spills_below`: the folder of this machine to which that Ray spills, if it is known.
    """

    session: Callable[[], AbstractContextManager[object]] = nullcontext
    spills_below: str | None = None

    def each(
        self,
        rows: RowsReader,
        make: Callable[[Iterator[pa.Table]], Iterator[T]],
        columns: list[str] | None,
        on_progress: OnProgress,
    ) -> Iterator[T]:
        """See `Executor`. Raises RayError for failures in Ray."""
        made = _parts(rows, partial(_make_each, rows=rows, make=make, columns=columns))
        made.context.target_max_block_size = BLOCK_BYTES
        parts, num_rows, began = 0, 0, time.monotonic()
        for more_parts, more_rows, value in made_values(made, rows.run.url):
            parts, num_rows = parts + more_parts, num_rows + more_rows
            yield value
            on_progress(parts / len(rows.names), pace(num_rows, began))

    def write(self, work: FileWork, files: Collection[ShardFile], on_progress: OnProgress) -> Iterator[MadeFile]:
        """See `Executor`. Raises RayError for failures in Ray, StorageError if a machine's disk is full."""
        if self.spills_below:
            require_room(_bytes_of(work.rows), int(ray.cluster_resources()["object_store_memory"]), self.spills_below)
        with errors_of_ray(work.rows.run.url):
            group_bytes, split_bytes = sizes_of_tasks(_bytes_of(work.rows), _cores(), work.plan.file_bytes)
            common, groups = ray.put(work), work.plan.groups(files, group_bytes)
            pieces = _split_all(work.rows, common, groups, split_bytes, phase(on_progress, 0.0, 0.5))
            yield from _write_all(common, groups, pieces, phase(on_progress, 0.5, 1.0))


def require_room(total: int, memory: int, folder: str) -> None:
    """Raise StorageError unless `total` bytes of rows fit into Ray's memory and the folder's disk together."""
    free = shutil.disk_usage(folder).free
    if total > memory + free:
        has, need = f"{amount(free)} are free", f"{amount(total - memory)} of rows on their way"
        raise StorageError(f"{folder}: {has}, and {need} don't fit into memory", OTHER_SCRATCH, passes=False)


def sizes_of_tasks(total: int, cores: int, file_bytes: int) -> tuple[int, int]:
    """Bytes of rows per write task and per split task, for `total` bytes in files of `file_bytes`."""
    group_bytes = max(1, total // MAX_GROUPS, min(file_bytes, total // (MIN_TASKS_PER_CORE * cores)))
    return group_bytes, max(group_bytes, MIN_PIECE_BYTES * -(-total // group_bytes))


def _split_all(
    rows: RowsReader, common: CommonWork, groups: Groups, split_bytes: int, on_progress: OnProgress
) -> list[list[Piece]]:
    """Start tasks that split all rows, each a share of the parts. Returns the pieces of each group."""
    places, split = ray.put([[file.place for file in group] for group in groups]), _task(_split, len(groups) + 1)
    pieces: list[list[Piece]] = [[] for _ in groups]
    running: list[ray.ObjectRef[tuple[int, int]]] = []
    for names in _shares(rows, split_bytes):
        read, *own = split.remote(names, common, places)
        running.append(read)
        for of_group, piece in zip(pieces, own, strict=True):
            of_group.append(piece)
    parts, num_rows, began = 0, 0, time.monotonic()
    for read_more in _as_they_end(running):
        if read_more:
            parts, num_rows = parts + read_more[0], num_rows + read_more[1]
        on_progress(parts / len(rows.names), pace(num_rows, began) if read_more else STALLED)
    return pieces


def _write_all(
    common: CommonWork, groups: Groups, pieces: list[list[Piece]], on_progress: OnProgress
) -> Iterator[MadeFile]:
    """Start tasks that write the files of all groups. Drops the pieces, so that Ray frees those that are written."""
    write, most = _task(_write), WRITES_PER_CORE * _cores()
    running: list[ray.ObjectRef[list[MadeFile]]] = []

    def start() -> None:
        number = len(groups) - len(pieces)
        running.append(write.remote(groups[number], common, *pieces.pop(0)))

    while pieces and len(running) < most:
        start()
    done = 0
    for files in _as_they_end(running):
        if files is None:
            on_progress(done / len(groups), STALLED)
            continue
        if pieces:
            start()
        yield from files
        done += 1
        on_progress(done / len(groups), f"{done:,} of {len(groups):,} groups of files")


def _as_they_end(running: "list[ray.ObjectRef[T]]") -> Iterator[T | None]:
    """Yield the results of tasks as they finish; tasks may be added meanwhile. The rest is cancelled on an error.

    Yields None if no task has finished for STALL_SECONDS. Ray raises OutOfDiskError if a task can't store its results,
    but waits silently if a task's arguments don't fit into memory, since these can't be spilled.
    """
    try:
        while running:
            ready, running[:] = ray.wait(running, timeout=STALL_SECONDS)
            yield ray.get(ready[0]) if ready else None
    finally:
        for each in running:
            ray.cancel(each)


def _task(function: Callable[..., Any], num_returns: int = 1) -> Any:
    """Make a function a task of one core, on any machine."""
    return ray.remote(num_cpus=1, scheduling_strategy="SPREAD", max_retries=RETRIES, num_returns=num_returns)(function)


def _shares(rows: RowsReader, split_bytes: int) -> Iterator[list[str]]:
    """Yield the names of the parts of each split task."""
    for share in np.array_split(rows.names, min(len(rows.names), -(-_bytes_of(rows) // split_bytes))):
        yield share.tolist()


def _split(names: list[str], work: FileWork, groups: Sequence[Sequence[int]]) -> Iterator[Any]:
    """Yield the numbers of parts and rows, then for each group its rows by the places of their files."""
    group_of = {place: number for number, places in enumerate(groups) for place in places}
    by_group: list[dict[int, list[pa.Table]]] = [{} for _ in groups]
    num_rows = 0
    for table in work.rows.parts(None, no_progress, names):
        num_rows += table.num_rows
        for place, own in work.split(table, group_of.keys()):
            by_group[group_of[place]].setdefault(place, []).append(own)
    yield len(names), num_rows
    for tables in by_group:
        yield {place: pa.concat_tables(own).combine_chunks() for place, own in tables.items()}
        tables.clear()


def _write(group: Sequence[ShardFile], work: FileWork, *pieces: dict[int, pa.Table]) -> list[MadeFile]:
    """Write a group's files; returns the written ones."""
    written = []
    for file in group:
        tables = [piece[file.place] for piece in pieces if file.place in piece]
        if tables and (one := work.made.write(file, pa.concat_tables(tables))):
            written.append(one)
    return written


def _bytes_of(rows: RowsReader) -> int:
    return sum(rows.sizes.values())


def _cores() -> int:
    """Number of cores of this Ray. Raises RayError if it has none, since no task could ever run."""
    if (cores := int(ray.cluster_resources().get("CPU", 0))) < 1:
        raise RayError("this Ray has no core, and a task of partition takes one", "start it with some, or add a node")
    return cores


def _parts(rows: RowsReader, make: Callable[[pa.Table], Iterator[pa.Table]]) -> ray.data.Dataset:
    """Make a dataset of the parts' names, and map `make` over it in tasks."""
    keep_quiet()
    cores, names = _cores(), [{"name": name} for name in rows.names]
    tasks = max(1, min(len(names), TASKS_PER_CORE * cores))
    dataset = ray.data.from_items(names, override_num_blocks=tasks)
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    return dataset.map_batches(
        make, batch_size=None, batch_format="pyarrow", num_cpus=1, compute=ray.data.TaskPoolStrategy(min(cores, tasks))
    )


def _make_each(
    names: pa.Table,
    rows: RowsReader,
    make: Callable[[Iterator[pa.Table]], Iterator[Any]],
    columns: list[str] | None,
) -> Iterator[pa.Table]:
    """Yield results of `make` on some parts as rows, each with the parts and rows read since the one before.

    A DDMError is the last result.
    """
    read = [0, 0]

    def tables() -> Iterator[pa.Table]:
        for table in rows.parts(columns, no_progress, names["name"].to_pylist()):
            read[:] = read[0] + 1, read[1] + table.num_rows
            yield table

    try:
        for value in make(tables()):
            yield to_row((*read, value))
            read[:] = 0, 0
    except DDMError as error:
        yield to_row(error)
