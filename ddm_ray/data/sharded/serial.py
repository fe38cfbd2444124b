"""A sharded stage in this process alone: chunk after chunk, or several units side by side."""

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
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


@dataclass(frozen=True)
class SideBySide:
    """The executor without Ray for chunks that keep one core busy each: `number` at once, by the same networks."""

    number: int

    def __call__(
        self, read: ReadUnit, maker: ChunkMaker[Any, RecordT], tasks: Sequence[Task[Any]]
    ) -> Generator[FinishedChunk[RecordT], None, None]:
        """An `Executor`. After an error, or once it is closed, units that haven't begun are left."""
        # One more than are made at once: it stores.
        finish, pool = FinishChunks(maker, self.number), ThreadPoolExecutor(self.number + 1)

        def unit(task: Task[Any]) -> list[FinishedChunk[RecordT]]:
            return [finish(task.number, chunk) for chunk in read(task.unit, task.done)]

        try:
            for future in as_completed([pool.submit(unit, task) for task in tasks]):
                yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)
