"""Guard of a step: a rank that hangs is ended, and running out of memory is blamed on the micro-batch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Self

from ddm_ray.train.failures import blame_micro_batch
from ddm_ray.train.watchdog import Watchdog


class StepGuard:
    """Guards what a rank does in its steps, each kind of work by a context manager; itself one, too.

    `stuck` is called with the reason before a process that hangs ends.
    """

    def __init__(self, hang_seconds: float, micro_batch: int, stuck: Callable[[str], None]):
        self._watchdog, self._micro_batch = Watchdog(hang_seconds, stuck), micro_batch

    def __enter__(self) -> Self:
        self._watchdog.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.__exit__()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Guard one step."""
        with self._watchdog.step(), self.memory():
            yield

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """Guard the making of code, which takes longer than the steps after it."""
        with self.step():
            yield
        self.forget_durations()

    @contextmanager
    def measurement(self, steps: float) -> Iterator[None]:
        """Guard a measurement of the held-out loss with the FLOPs of so many steps."""
        with self._watchdog.measurement(steps), self.memory("measuring the held-out loss, "):
            yield

    def memory(self, doing: str = "") -> AbstractContextManager[None]:
        """Turn running out of memory into OutOfMemory."""
        return blame_micro_batch(self._micro_batch, doing)

    def forget_durations(self) -> None:
        """Forget how long steps took: the next ones are of another kind, and may have to be compiled."""
        self._watchdog.forget()
