"""A watchdog beside the loop: a step that takes far longer than usual ends the process, so that others may go on."""

import os
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Self

FIRST_STEP_SECONDS = 600.0
USUAL_STEPS = 3
REMEMBERED = 20


class Watchdog:
    """A context manager: once a step takes longer than 3 usual ones and `hang_seconds`, `stuck` is called, then the
    process ends. The first step may take FIRST_STEP_SECONDS, since it may compile.

    Ended like this and not by an exception, since the thread that hangs can't be interrupted.
    """

    def __init__(self, hang_seconds: float, stuck: Callable[[str], None]):
        self._hang_seconds, self._stuck = hang_seconds, stuck
        self._took: deque[float] = deque(maxlen=REMEMBERED)
        self._began: float | None = None
        self._ended = Event()
        self._thread = Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is watched."""
        self._began = began = time.monotonic()
        try:
            yield
        finally:
            self._began = None
        self._took.append(time.monotonic() - began)

    @property
    def limit(self) -> float:
        """Seconds that a step may take now."""
        if not self._took:
            return FIRST_STEP_SECONDS + self._hang_seconds
        return USUAL_STEPS * statistics.median(self._took) + self._hang_seconds

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._hang_seconds / 4)):
            began = self._began
            if began is not None and (seconds := time.monotonic() - began) > self.limit:
                for thread, frame in sys._current_frames().items():
                    print(f"thread {thread}:\n{''.join(traceback.format_stack(frame))}", file=sys.stderr)
                self._stuck(f"a step hangs for {seconds:.0f} s")
                sys.stderr.flush()
                os._exit(1)
