"""The lookout of an attempt: a thread that sees what others do on storage while this one trains.

Whether a newer attempt has taken over while it was away, and whether it is asked to stop.
"""

from threading import Event, Thread

from ddm_ray.errors import DDMError, Stopped
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.jobs.fencing import LOOK_SECONDS as LOOK_SECONDS
from ddm_ray.jobs.fencing import Fence, NewerAttempt
from ddm_ray.jobs.launches import Launch
from ddm_ray.jobs.stops import StopRequests
from ddm_ray.run.graph import Artifact


class Lookout:
    """Looks every LOOK_SECONDS, until there is a `successor`, of which it then knows if it lives, or a `stop`.

    What can't be read is read again.
    """

    def __init__(self, attempt: Attempt, launch: Launch | None = None):
        self.successor: NewerAttempt | None = None
        self.stop: Stopped | None = None
        self._fence, self._closing = Fence(attempt), Event()
        self._requests = StopRequests(attempt.store, Artifact(attempt.job), launch)
        self._thread = Thread(target=self._work, name="lookout", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, without waiting for a look that storage holds up."""
        self._closing.set()

    def _work(self) -> None:
        while not (self.successor or self.stop or self._closing.wait(LOOK_SECONDS)):
            try:
                successor, stop = self._fence.look(), self._requests.look()
            except (DDMError, OSError, ValueError, RecursionError):
                continue
            if successor and successor.lives is not None:
                self.successor = successor
            self.stop = stop
