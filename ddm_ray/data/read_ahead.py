"""Read items ahead of their use."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(read: Callable[[Item], Result], items: Iterable[Item], ahead: int) -> Iterator[Result]:
    """Yield `read` of each item, in order. While one is used, up to `ahead` more are read, each in its own thread."""
    todo = iter(items)
    with ThreadPoolExecutor(ahead) as pool:
        pending = deque[Future[Result]](pool.submit(read, item) for item in islice(todo, ahead))
        while pending:
            result = pending.popleft().result()
            pending.extend(pool.submit(read, item) for item in islice(todo, ahead - len(pending)))
            yield result
