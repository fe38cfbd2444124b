"""A sharded stage on a Ray cluster, by Ray Data: tasks read units, actors with networks finish chunks.

A row of the pipeline is a whole chunk, and so is a block: nothing splits a chunk or joins it to another.
"""

import logging
import math
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
from ray.data.context import AutoscalingConfig
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayTaskError, UserCodeException
from ray.exceptions import RayError as RayOwnError

from ddm_ray.data.sharded.chunk_store import RecordT
from ddm_ray.data.sharded.work import CHUNK_BYTES, ChunkMaker, FinishChunks, FinishedChunk, ReadUnit, Task
from ddm_ray.errors import DDMError, RayAway, RayError, StorageError
from ddm_ray.memory import KEEP_FREED_MEMORY
from ddm_ray.placement import PreparePlacement
from ddm_ray.spelling import one_line

TASKS_PER_CORE = 16
ROOM = "free some space where its machines spill objects to"
# Values as pickle sees them, and apart from these the memory of their arrays, which isn't copied when it is read.
_VALUE = pa.schema([("value", pa.binary()), ("buffers", pa.list_(pa.large_binary()))])


@dataclass(frozen=True)
class RayData:
    """The executor on a Ray cluster.

    `session`: opened while there is something to make, for whoever lets it start Ray; none: Ray is initialised.
    """

    placement: PreparePlacement = field(default_factory=PreparePlacement)
    session: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(
        self, read: ReadUnit, maker: ChunkMaker[Any, RecordT], tasks: Sequence[Task[Any]]
    ) -> Generator[FinishedChunk[RecordT], None, None]:
        """An `Executor`. Raises RayError for what fails in Ray, and where it has no GPU though one is asked for."""
        keep_quiet()
        with self.session():
            yield from _finished_chunks(read, maker, tasks, _Shares.of_cluster(self.placement))


def keep_quiet() -> None:
    """Have Ray Data's lines on each execution in its log file alone: the caller shows progress. Others hear all."""
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler) and type(handler).__module__.startswith("ray."):
            handler.setLevel(logging.ERROR)


def _finished_chunks(
    read: ReadUnit, maker: ChunkMaker[Any, RecordT], tasks: Sequence[Task[Any]], shares: "_Shares"
) -> Generator[FinishedChunk[RecordT], None, None]:
    # Which chunks a task makes is fixed before it starts: Ray makes lost ones again by running it again.
    num_blocks = min(len(tasks), TASKS_PER_CORE * shares.tasks)
    dataset = ray.data.from_items([{"task": pickle.dumps(task)} for task in tasks], override_num_blocks=num_blocks)
    _one_chunk_a_block(dataset.context, shares.tasks + shares.actors)
    finished = dataset.map_batches(
        partial(_read, read=read),
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=shares.task_cpus,
        compute=ray.data.TaskPoolStrategy(min(shares.tasks, num_blocks)),
    ).map_batches(
        _Finish,
        fn_constructor_args=(maker,),
        batch_size=None,
        batch_format="pyarrow",
        # A pool of fixed size can hang on an errored block (ray#62746). Two calls at once: one embeds, one writes.
        compute=ray.data.ActorPoolStrategy(
            min_size=1,
            max_size=max(2, shares.actors),
            max_tasks_in_flight_per_actor=2,
            max_concurrent_calls_per_actor=2,
            enable_true_multi_threading=True,
        ),
        num_cpus=shares.actor_cpus,
        num_gpus=shares.actor_gpus,
        runtime_env={"env_vars": KEEP_FREED_MEMORY},
    )
    yield from made_values(finished, maker.chunks.url)


def made_values(dataset: ray.data.Dataset, url: str) -> Iterator[Any]:
    """The values of a dataset of rows as `to_row` makes them; an error among them is raised.

    Raises what `errors_of_ray` does.
    """
    with errors_of_ray(url):
        for row in dataset.iter_rows():
            value = pickle.loads(row["value"], buffers=row["buffers"])
            if isinstance(value, DDMError):
                raise value
            yield value


@contextmanager
def errors_of_ray(url: str) -> Iterator[None]:
    """Turn what fails in Ray into a RayError of one line that names `url`.

    A DDMError that a task raised is raised as it is. Raises StorageError where a machine has no room for rows.
    """
    try:
        yield
    except RayOwnError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, DDMError):
            raise cause from None
        if isinstance(cause, OutOfDiskError | ObjectStoreFullError):
            raise StorageError(f"{url}: a machine of this Ray has no room for rows on their way", ROOM, False) from None
        if (ours := _our_own(error)) is not None:
            raise RayError(
                f"{url}: {ours}; this is likely a bug, which the same command would meet again: report it with"
                " the traceback in ray-data/ray-data.log among the logs of this Ray"
            ) from error
        reason = one_line(error, 300, tail=True)
        raise RayAway(f"Ray gave up on {url}: ...{reason}", "the same command goes on") from error


def _read(tasks: pa.Table, read: ReadUnit) -> Iterator[pa.Table]:
    """The missing chunks of some tasks, each a row, with the number of its unit.

    A DDMError ends them, as such a row: Ray would wrap an exception, log it, and forget its cause.
    """
    try:
        for task in map(pickle.loads, tasks["task"].to_pylist()):
            for chunk in read(task.unit, task.done):
                yield to_row((task.number, chunk))
    except DDMError as error:
        yield to_row(error)


class _Finish:
    """`FinishChunks` of rows."""

    def __init__(self, maker: ChunkMaker[Any, Any]):
        self._finish = FinishChunks(maker)

    def __call__(self, rows: pa.Table) -> pa.Table:
        return pa.concat_tables([to_row(self._finished(rows.slice(row, 1))) for row in range(rows.num_rows)])

    def _finished(self, row: pa.Table) -> FinishedChunk[Any] | DDMError:
        value = from_row(row)
        try:
            return value if isinstance(value, DDMError) else self._finish(*value)
        except DDMError as error:
            return error


def to_row(value: object) -> pa.Table:
    """Any value that can be pickled, as a table of one row."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    joined = raw[0] if len(raw) == 1 else b"".join(raw)  # a single one isn't copied
    offsets = np.cumsum([0, *map(len, raw)], dtype=np.int64)
    arrays = pa.Array.from_buffers(pa.large_binary(), len(raw), [None, pa.py_buffer(offsets), pa.py_buffer(joined)])
    return pa.table({"value": [data], "buffers": pa.ListArray.from_arrays([0, len(raw)], arrays)}, schema=_VALUE)


def from_row(row: pa.Table) -> Any:
    buffers = row["buffers"][0].values
    return pickle.loads(row["value"][0].as_py(), buffers=[buffer.as_buffer() for buffer in buffers])


def _our_own(error: RayOwnError) -> str | None:
    """The line of an exception that our functions raised on a worker; None if it is Ray's or a machine's fault."""
    if not isinstance(error, RayTaskError):
        return None
    if isinstance(error.cause, UserCodeException):
        # Only the text of the traceback that it wraps comes back.
        traceback, _, _ = str(error).partition("\nThe above exception was the direct cause")
        return traceback.strip().splitlines()[-1][:300]
    if isinstance(error.cause, RayOwnError):
        return None
    return f"{type(error.cause).__name__}: {error.cause}".splitlines()[0][:300]


@dataclass(frozen=True)
class _Shares:
    """Numbers of actors that finish and of tasks that read at once, and what one of each asks of Ray."""

    actors: int
    tasks: int
    actor_cpus: float
    actor_gpus: float | None
    task_cpus: float = 0.25

    @classmethod
    def of_cluster(cls, placement: PreparePlacement) -> "_Shares":
        """Shares of the connected cluster.

        Readers and embedders may each use every core; backpressure between the two stages decides the split.
        """
        resources = ray.cluster_resources()
        cores, devices = max(1, int(resources.get("CPU", 1))), int(resources.get("GPU", 0))
        if placement.use_gpu and not devices:
            raise RayError("the placement says use_gpu, and this Ray cluster has no GPU; choose another island")
        actors = placement.embedders or (devices if placement.use_gpu else cores)
        # Ray Data keeps a quarter of the cores for either kind, come what may: more would have to be argued for.
        actor_cpus = min(0.24, max(0.01, math.floor(24 * cores / actors) / 100))
        return cls(actors, cores, actor_cpus, 1.0 if placement.use_gpu else None)


def _one_chunk_a_block(context: ray.data.DataContext, num_processes: int) -> None:
    context.target_max_block_size = 1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # One more actor whenever all have what they can take; none is given up while it may be fed again.
    context.autoscaling_config = AutoscalingConfig(
        actor_pool_util_upscaling_threshold=1.0, actor_pool_util_downscaling_threshold=-1.0
    )
    # Chunks in flight, however much memory Ray has: what a process makes or works on, and the next.
    context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
        object_store_memory=2 * CHUNK_BYTES * num_processes
    )
