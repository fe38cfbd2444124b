"""A watchdog beside the loop: a step that takes far longer than usual ends the process, so that others may go on."""

import os
import statistics
import subprocess
import sys
import threading
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
    """A context manager: once a step takes longer than 3 usual ones and `hang_seconds`, `stuck` is called, then the
    process ends. The first step, or first after `forget`, may take FIRST_STEP_SECONDS: it may compile. Time in which
    the step's thread waits for a processor, as on a crowded machine, isn't counted. A measurement is watched likewise,
    beside other measurements.

    Ended like this and not by an exception, since the thread that hangs can't be interrupted. Where no thread runs for
    `hang_seconds`, in a step or not, a liveness monitor kills the process.
    """

    def __init__(self, hang_seconds: float, stuck: Callable[[str], None]):
        self._hang_seconds, self._stuck = hang_seconds, stuck
        self._took = {work: deque[float](maxlen=REMEMBERED) for work in (STEP, MEASUREMENT)}
        self._under_way: _Work | None = None
        self._stepping = threading.get_native_id()
        self._ended = Event()
        self._thread = Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        # No site packages, no environment: it starts in 20 ms.
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
        """Watch one measurement, as of the held-out loss, whose FLOPs are those of so many `steps`."""
        return self._watched(MEASUREMENT, steps)

    @contextmanager
    def _watched(self, kind: str, steps: float = 0.0) -> Iterator[None]:
        self._stepping = threading.get_native_id()
        work = self._under_way = _Work(kind, time.monotonic(), self._limit(kind, steps))
        try:
            yield
        finally:
            self._under_way = None
        self._took[kind].append(time.monotonic() - work.began)

    def forget(self) -> None:
        """The next step and measurement are others than those so far."""
        for took in self._took.values():
            took.clear()

    @property
    def limit(self) -> float:
        """Seconds that what is under way may take, or else the next step."""
        work = self._under_way
        return work.limit if work else self._limit(STEP)

    def _limit(self, kind: str, steps: float = 0.0) -> float:
        if took := self._took[kind]:
            return USUAL_STEPS * statistics.median(took) + self._hang_seconds
        usual = USUAL_STEPS * steps * statistics.median(self._took[STEP] or [0.0])
        return FIRST_STEP_SECONDS + usual + self._hang_seconds

    def _watch(self) -> None:
        assert self._monitor.stdin is not None
        each = min(1.0, self._hang_seconds / 4)
        looked, watched, stopped, computed = time.monotonic(), self._under_way, 0.0, 0.0
        while not self._ended.wait(each):
            with suppress(BrokenPipeError):  # somebody killed it
                self._monitor.stdin.write(b".")
            now, work = time.monotonic(), self._under_way
            # What held this thread up too was no hang: the process was stopped, or the machine.
            held, before = max(0.0, now - looked - each), computed
            # Nor is what the machine is too crowded for: whom it waits for, as other ranks, may have to wait, too.
            held = max(held, (now - looked) * (1 - processor_share()))
            wants, computed = _turn(self._stepping)
            if wants:
                held = max(held, now - looked - max(0.0, computed - before))
            stopped = (stopped if work == watched else 0.0) + held
            looked, watched = now, work
            if work is not None and (seconds := now - work.began - stopped) > work.limit:
                for thread, frame in sys._current_frames().items():
                    print(f"thread {thread}:\n{''.join(traceback.format_stack(frame))}", file=sys.stderr)
                self._stuck(f"a {work.kind} hangs for {seconds:.0f} s")
                sys.stderr.flush()
                os._exit(1)


def _turn(thread: int) -> tuple[bool, float]:
    """True if a thread of this process runs or waits for its turn to; and the seconds of processors that it has had."""
    try:
        fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False, 0.0
    return fields[0] == "R", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
