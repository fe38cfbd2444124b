"""The heartbeat of an attempt: a thread writes the last progress, so that training never waits for storage."""

import sys
import time
from threading import Condition, Thread
from typing import Any

from ddm_ray.jobs.attempts import Attempt

BEAT_SECONDS, MAX_BEAT_SECONDS = 1.0, 5.0
CLOSE_SECONDS = 15.0
TRAINING, LEAVING = "training", "leaving"


def beat_seconds(age: float) -> float:
    """Seconds between two beats of an attempt that is `age` seconds old: a fiftieth of that, within limits.

    People watch an attempt when it is new; later they pay for each beat, which is a request to storage.
    """
    return min(MAX_BEAT_SECONDS, max(BEAT_SECONDS, age / 50))


class Heartbeat:
    """Beats once for each `tell`, if storage is that fast, and by itself in phases without steps.

    In the training phase it beats only as steps are done, so that an attempt that hangs falls silent. Each beat says in
    `beat_seconds` when the next one is due, so that readers know from when on it is missing. A warning is printed for
    the first, second, fourth, eighth (and so on) beat that fails. After a beat that fails, the next one is
    MAX_BEAT_SECONDS later.
    """

    def __init__(self, attempt: Attempt, always: dict[str, Any]):
        self._attempt, self._always = attempt, always
        self._progress: dict[str, Any] = {}
        self._beats, self._fresh, self._ended = 0, False, False
        self._began = time.monotonic()
        self._changed = Condition()
        self._thread = Thread(target=self._work, name="heartbeat", daemon=True)
        self._thread.start()

    def tell(self, phase: str, **progress: Any) -> None:
        """Set the progress to write; of several that come fast only the last is written."""
        with self._changed:
            self._progress, self._fresh = {"phase": phase, **progress}, True
            self._changed.notify()

    def close(self) -> None:
        """Write the last progress once more, with the phase LEAVING, so that readers look for the reason; then end.

        Waits CLOSE_SECONDS at most. Never raises.
        """
        with self._changed:
            if self._progress:
                self._progress = {**self._progress, "phase": LEAVING}
            self._ended = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            where = f"{self._attempt.store.url}/{self._attempt.prefix}"
            print(f"warning: {where}: storage is slow, the last heartbeat may be missing", file=sys.stderr)

    def _work(self) -> None:
        ended, failed = False, 0
        while not ended:
            pause = beat_seconds(time.monotonic() - self._began)
            with self._changed:
                if not (self._fresh or self._ended):
                    self._changed.wait(pause)
                due, ended = self._fresh or self._progress.get("phase", TRAINING) != TRAINING, self._ended
                progress, self._fresh = self._progress, False
            if due and not (ended and not progress):
                self._beats += 1
                try:
                    self._attempt.beat({"beat": self._beats, "beat_seconds": pause, **progress, **self._always})
                except Exception as error:  # any error: training goes on without heartbeats
                    failed += 1
                    if failed.bit_count() == 1:
                        times = f" ({failed} heartbeats failed)" if failed > 1 else ""
                        print(f"warning: {error}{times}", file=sys.stderr)
                    with self._changed:
                        self._changed.wait_for(lambda: self._ended, MAX_BEAT_SECONDS)
