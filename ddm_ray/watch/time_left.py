"""The time left of a stage, by the shares of its work that it has reported."""

from collections import deque

LEAST_SECONDS = 30.0
"""Shortest time that a speed is measured over, once so much has passed."""
LEAST_SHARE = 0.001
"""Growth of the share that is worth a sample."""


class TimeLeft:
    """Estimates the time left from the speed in the second half of the time so far. Times are readings of one clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()
        self._began: float | None = None

    def add(self, now: float, share: float) -> None:
        """Note that `share` of the work is done. The clock starts at the last report before the share grows."""
        if len(self._samples) == 1 and share <= self._samples[0][1]:
            self._samples.clear()
        if not self._samples:
            self._began = now
        if not self._samples or share >= self._samples[-1][1] + LEAST_SHARE:
            self._samples.append((now, share))

    def seconds(self, now: float) -> float | None:
        """Seconds left; None before the share has grown, and once the next report is overdue."""
        if self._began is None or len(self._samples) < 2:
            return None
        half = now - max(LEAST_SECONDS, (now - self._began) / 2)
        while len(self._samples) > 2 and self._samples[1][0] <= half:
            self._samples.popleft()
        (first, before), (last, share) = self._samples[0], self._samples[-1]
        if last <= first or share >= 1:
            return None
        left = (1 - share) * (last - first) / (share - before) - (now - last)
        return left if left > 0 else None
