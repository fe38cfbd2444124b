"""A sharded stage on a Ray cluster, by Ray Data: tasks read units, actors with networks finish chunks.

A row of the pipeline is a whole chunk, and so is a block: Ray Data never splits or merges chunks.
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
# Pickled values, and separately the memory of their arrays, which is read without a copy.
_VALUE = pa.schema([("value", pa.binary()), ("buffers", pa.list_(pa.large_binary()))])


@dataclass(frozen=True)
class RayData:
    """The executor on a Ray cluster.

    `session`: entered if there are chunks to make, for callers that let it start Ray; without one, Ray is initialised.
    """

    placement: PreparePlacement = field(default_factory=PreparePlacement)
    session: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(
        self, read: ReadUnit, maker: ChunkMaker[Any, RecordT], tasks: Sequence[Task[Any]]
    ) -> Generator[FinishedChunk[RecordT], None, None]:
        """See `Executor`. Raises RayError for failures in Ray, and if it has no GPU though one is requested."""
        keep_quiet()
        with self.session():
            yield from _finished_chunks(read, maker, tasks, _Shares.of_cluster(self.placement))


def keep_quiet() -> None:
    """Limit Ray Data's log lines to its log file, since the caller shows progress. Other handlers stay as they are."""
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler) and type(handler).__module__.startswith("ray."):
            handler.setLevel(logging.ERROR)


def _finished_chunks(
    read: ReadUnit, maker: ChunkMaker[Any, RecordT], tasks: Sequence[Task[Any]], shares: "_Shares"
) -> Generator[FinishedChunk[RecordT], None, None]:
    # The chunks of a task are fixed before it starts, since Ray recovers lost ones by running the task again.
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
    """Yield the values of a dataset with rows made by `to_row`; raise the first error among them.

    Raises as `errors_of_ray`.
    """
    with errors_of_ray(url):
        for row in dataset.iter_rows():
            value = pickle.loads(row["value"], buffers=row["buffers"])
            if isinstance(value, DDMError):
                raise value
            yield value


@contextmanager
def errors_of_ray(url: str) -> Iterator[None]:
    """Turn failures in Ray into a RayError of one line that names `url`.

    Re-raises a DDMError of a task unchanged. Raises StorageError if a machine has no room for rows.
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
    """Yield the missing chunks of some tasks as rows, each with the number of its unit.

    A DDMError is the last row: Ray would wrap an exception, log it, and lose its cause.
    """
    try:
        for task in map(pickle.loads, tasks["task"].to_pylist()):
            for chunk in read(task.unit, task.done):
                yield to_row((task.number, chunk))
    except DDMError as error:
        yield to_row(error)


class _Finish:
    """`FinishChunks` on rows."""

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
    """Convert any value that can be pickled to a table of one row."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    joined = raw[0] if len(raw) == 1 else b"".join(raw)  # no copy of a single buffer
    offsets = np.cumsum([0, *map(len, raw)], dtype=np.int64)
    arrays = pa.Array.from_buffers(pa.large_binary(), len(raw), [None, pa.py_buffer(offsets), pa.py_buffer(joined)])
    return pa.table({"value": [data], "buffers": pa.ListArray.from_arrays([0, len(raw)], arrays)}, schema=_VALUE)


def from_row(row: pa.Table) -> Any:
    buffers = row["buffers"][0].values
    return pickle.loads(row["value"][0].as_py(), buffers=[buffer.as_buffer() for buffer in buffers])


def _our_own(error: RayOwnError) -> str | None:
    """The message of an exception that our code raised on a worker; None if Ray or a machine failed."""
    if not isinstance(error, RayTaskError):
        return None
    if isinstance(error.cause, UserCodeException):
        # Ray returns only the text of the wrapped traceback.
        traceback, _, _ = str(error).partition("\nThe above exception was the direct cause")
        return traceback.strip().splitlines()[-1][:300]
    if isinstance(error.cause, RayOwnError):
        return None
    return f"{type(error.cause).__name__}: {error.cause}".splitlines()[0][:300]


@dataclass(frozen=True)
class _Shares:
    """Numbers of concurrent finishing actors and reading tasks, and the resources that each requests from Ray."""

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
        # Ray Data reserves a quarter of the cores for each kind in any case, so all actors together stay below that.
        actor_cpus = min(0.24, max(0.01, math.floor(24 * cores / actors) / 100))
        return cls(actors, cores, actor_cpus, 1.0 if placement.use_gpu else None)


def _one_chunk_a_block(context: ray.data.DataContext, num_processes: int) -> None:
    context.target_max_block_size = 1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # Adds an actor when all are busy, and removes none while more input may come.
    context.autoscaling_config = AutoscalingConfig(
        actor_pool_util_upscaling_threshold=1.0, actor_pool_util_downscaling_threshold=-1.0
    )
    # Bounds the chunks in flight, whatever Ray's memory: per process, the current chunk and the next.
    context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
        object_store_memory=2 * CHUNK_BYTES * num_processes
    )
