"""A sharded stage in this process: one chunk after another, or several units concurrently."""

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
    """The executor without Ray for chunks that each keep one core busy: `number` at a time, sharing the networks."""

    number: int

    def __call__(
        self, read: ReadUnit, maker: ChunkMaker[Any, RecordT], tasks: Sequence[Task[Any]]
    ) -> Generator[FinishedChunk[RecordT], None, None]:
        """See `Executor`. After an error, or once it is closed, units that haven't started are skipped."""
        # One more thread than chunks are made in, for storing finished ones.
        finish, pool = FinishChunks(maker, self.number), ThreadPoolExecutor(self.number + 1)

        def unit(task: Task[Any]) -> list[FinishedChunk[RecordT]]:
            return [finish(task.number, chunk) for chunk in read(task.unit, task.done)]

        try:
            for future in as_completed([pool.submit(unit, task) for task in tasks]):
                yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)
