"""Meters of what this process exchanges with stores: bytes of objects, and requests, counted where they pass."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from types import MappingProxyType

LISTED_AT_ONCE = 1000
# obstore's own: bytes from which it uploads in parts, an object and a stream.
PART, STREAM_PART = 5 * 2**20, 10 * 2**20
# Bytes of XML around all paths of a listing, and around each.
_LISTING, _LISTED = 250, 155


@dataclass(frozen=True)
class Counted:
    """Bytes of objects that were read and written, and the number of requests by kind, as one pays for them."""

    read: int = 0
    written: int = 0
    requests: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __sub__(self, before: "Counted") -> "Counted":
        requests = Counter(self.requests)
        requests.subtract(before.requests)
        return Counted(self.read - before.read, self.written - before.written, +requests)


class StoreMeter:
    """Counts for one store's URL in this process, whichever threads and whichever `Store`s of that URL ask.

    Left out: requests that obstore repeats by itself within seconds, headers, the XML of errors and deletions.
    """

    def __init__(self, url: str):
        self._url, self._lock = url, Lock()
        self._read = self._written = 0
        self._requests: Counter[str] = Counter()

    def __reduce__(self) -> tuple[Callable[[str], "StoreMeter"], tuple[str]]:
        # A store that Ray sends to another process is counted there by that one's own.
        return meter_of, (self._url,)

    def asks(self, kind: str, requests: int = 1) -> None:
        """Count requests: GET, HEAD, LIST, PUT, POST."""
        with self._lock:
            self._requests[kind] += requests

    def reads(self, size: int) -> None:
        """Count bytes that came."""
        with self._lock:
            self._read += size

    def lists(self, paths: Sequence[str]) -> None:
        """Count listings of these paths, and about the bytes of the XML that S3 writes of them."""
        pages = max(1, -(-len(paths) // LISTED_AT_ONCE))
        with self._lock:
            self._requests["LIST"] += pages
            self._read += _LISTING * pages + sum(_LISTED + len(path) for path in paths)

    def writes(self, size: int, part: int) -> None:
        """Count bytes that were taken, and the requests: one, or those of an upload in parts of so many bytes."""
        with self._lock:
            self._written += size
            self._requests["PUT"] += max(1, -(-size // part))
            self._requests["POST"] += 2 if size > part else 0

    @property
    def counted(self) -> Counted:
        """All so far."""
        with self._lock:
            return Counted(self._read, self._written, dict(self._requests))


_meters: dict[str, StoreMeter] = {}
_making = Lock()


def meter_of(url: str) -> StoreMeter:
    """The meter of this process for a store's URL."""
    with _making:
        return _meters.setdefault(url, StoreMeter(url))


def _begin_anew() -> None:
    """Forget what the process did that this one was forked from; its locks may be held for ever."""
    global _making
    _making = Lock()
    for url, meter in _meters.items():
        meter.__init__(url)  # type: ignore[misc]


os.register_at_fork(after_in_child=_begin_anew)
