"""The lookout of an attempt: a thread that sees whether a newer attempt has taken over while this one was away."""

from threading import Event, Thread

from ddm_ray.errors import DDMError
from ddm_ray.storage.attempts import Attempt
from ddm_ray.storage.succession import LOOK_SECONDS as LOOK_SECONDS
from ddm_ray.storage.succession import Succession, Successor


class Lookout:
    """Looks every LOOK_SECONDS, until there is a `successor`.

    Of that it then knows if it lives. What can't be read is read again.
    """

    def __init__(self, attempt: Attempt):
        self.successor: Successor | None = None
        self._succession, self._closing = Succession(attempt), Event()
        self._thread = Thread(target=self._work, name="lookout", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, without waiting for a look that storage holds up."""
        self._closing.set()

    def _work(self) -> None:
        while self.successor is None and not self._closing.wait(LOOK_SECONDS):
            try:
                successor = self._succession.look()
            except (DDMError, OSError, ValueError, RecursionError):
                continue
            if successor and successor.lives is not None:
                self.successor = successor
