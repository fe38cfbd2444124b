"""A sharded stage in this process alone, chunk after chunk."""

from collections.abc import Generator, Sequence
from typing import Any

from ddm_ray.data.sharded.chunk_store import RecordT
from ddm_ray.data.sharded.work import ChunkMaker, FinishChunks, FinishedChunk, ReadUnit, Task


def serial(
    read: ReadUnit, maker: ChunkMaker[Any, RecordT], tasks: Sequence[Task[Any]]
) -> Generator[FinishedChunk[RecordT], None, None]:
    """An `Executor` without Ray."""
    finish = FinishChunks(maker)
    for task in tasks:
        for chunk in read(task.unit, task.done):
            yield finish(task.number, chunk)
