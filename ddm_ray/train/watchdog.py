"""A watchdog of the training loop: it ends the process if a step takes far longer than usual."""

import os
import statistics
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Self

from ddm_ray.train.liveness import processor_share

FIRST_STEP_SECONDS = 600.0
USUAL_STEPS = 3
REMEMBERED = 20
STEP, MEASUREMENT = "step", "measurement"
MONITOR = Path(__file__).with_name("liveness.py")


@dataclass(frozen=True)
class _Work:
    """A step or a measurement under way: since when, and the seconds that it may take."""

    kind: str
    began: float
    limit: float


class Watchdog:
    """A context manager: once a step takes longer than 3 usual ones and `hang_seconds`, the process ends.

    `stuck` is called just before. The first step, or the first after `forget`, may take FIRST_STEP_SECONDS: it may
    compile. On a crowded machine only the share of time counts that the machine has processors for. Measurements are
    watched likewise, compared with other measurements.

    The process ends, since the thread that hangs can't be interrupted by an exception. If no thread of the process runs
    for `hang_seconds`, in a step or not, a liveness monitor kills the process.
    """

    def __init__(self, hang_seconds: float, stuck: Callable[[str], None]):
        self._hang_seconds, self._stuck = hang_seconds, stuck
        self._took = {work: deque[float](maxlen=REMEMBERED) for work in (STEP, MEASUREMENT)}
        self._under_way: _Work | None = None
        self._ended = Event()
        self._thread = Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        # Without site packages and environment it starts in 20 ms.
        command = [sys.executable, "-I", "-S", str(MONITOR), f"{self._hang_seconds:g}"]
        self._monitor = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._monitor.communicate()

    def step(self) -> AbstractContextManager[None]:
        """Watch one step."""
        return self._watched(STEP)

    def measurement(self, steps: float) -> AbstractContextManager[None]:
        """Watch one measurement, such as the held-out loss, with the FLOPs of so many `steps`."""
        return self._watched(MEASUREMENT, steps)

    @contextmanager
    def _watched(self, kind: str, steps: float = 0.0) -> Iterator[None]:
        work = self._under_way = _Work(kind, time.monotonic(), self._limit(kind, steps))
        try:
            yield
        finally:
            self._under_way = None
        self._took[kind].append(time.monotonic() - work.began)

    def forget(self) -> None:
        """Forget how long steps and measurements took: the next ones are of another kind."""
        for took in self._took.values():
            took.clear()

    @property
    def limit(self) -> float:
        """Seconds that the step or measurement under way may take; without one, the next step."""
        work = self._under_way
        return work.limit if work else self._limit(STEP)

    def _limit(self, kind: str, steps: float = 0.0) -> float:
        if took := self._took[kind]:
            return USUAL_STEPS * statistics.median(took) + self._hang_seconds
        usual = USUAL_STEPS * steps * statistics.median(self._took[STEP] or [0.0])
        return FIRST_STEP_SECONDS + usual + self._hang_seconds

    def _watch(self) -> None:
        assert self._monitor.stdin is not None
        pause = min(1.0, self._hang_seconds / 4)
        looked, watched, uncounted = time.monotonic(), self._under_way, 0.0
        while not self._ended.wait(pause):
            with suppress(BrokenPipeError):  # the monitor may have been killed
                self._monitor.stdin.write(b".")
            now, work = time.monotonic(), self._under_way
            # Time in which this thread was held up, too, was no hang: the process was stopped, or the machine slept.
            held = max(0.0, now - looked - pause)
            # On a crowded machine this process, or the rank that it waits for, has only a share of a processor.
            held = max(held, (now - looked) * (1 - processor_share()))
            uncounted = (uncounted if work == watched else 0.0) + held
            looked, watched = now, work
            if work is not None and (seconds := now - work.began - uncounted) > work.limit:
                for thread, frame in sys._current_frames().items():
                    print(f"thread {thread}:\n{''.join(traceback.format_stack(frame))}", file=sys.stderr)
                self._stuck(f"a {work.kind} hangs for {seconds:.0f} s")
                sys.stderr.flush()
                os._exit(1)
