"""The thread in which an engine of this process runs, or several that share a device. No Ray, no HTTP."""

import threading
from abc import ABC, abstractmethod

from ddm_ray.errors import ServeError

STOPS = "the server stops"


class EngineThread(ABC):
    """The engine of this process behind some runners: its work in a thread, its gauges, its health and its end."""

    def __init__(self, changed: threading.Condition | None = None) -> None:
        """`changed` wakes the thread for work; engines that share a thread share it, and aren't started themselves."""
        self._changed = threading.Condition() if changed is None else changed
        self._closed = False
        self._thread = threading.Thread()

    @property
    @abstractmethod
    def batch_rows(self) -> int:
        """Rows of all batches."""

    @property
    @abstractmethod
    def waiting_rows(self) -> int:
        """Rows that wait for a place in a batch."""

    @property
    @abstractmethod
    def num_velocities(self) -> int:
        """Velocities that batches have had."""

    @abstractmethod
    def tick(self) -> bool:
        """Run one velocity of a batch; False if there is nothing to do."""

    @abstractmethod
    def require_success(self) -> None:
        """Raise ServeError if nothing succeeds any more."""

    @abstractmethod
    def _has_work(self) -> bool:
        """True if `tick` has something to do."""

    @abstractmethod
    def _end_all(self) -> None:
        """Give ServeError to all callers that wait."""

    def start(self) -> None:
        """Run in a thread until `close`."""
        # Made here, since a thread that never runs would keep its engine alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self, seconds: float = 60.0) -> None:
        """Stop after the velocity that is on its way, waiting so long for it; callers that wait get ServeError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(seconds)
        self._end_all()

    def require_running(self) -> None:
        """Raise ServeError if the thread has stopped, or if nothing succeeds any more."""
        if not self._thread.is_alive():
            raise ServeError(STOPS)
        self.require_success()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not self._closed and not self._has_work():
                        self._changed.wait()
                    if self._closed:
                        return
                self.tick()
        finally:
            self._closed = True
            self._end_all()
