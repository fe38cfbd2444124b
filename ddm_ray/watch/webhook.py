"""Delivery of events to a webhook, by a thread of its own, so that a slow or dead webhook never delays watching."""

import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from ddm_ray.errors import ConfigError
from ddm_ray.spelling import one_line
from ddm_ray.watch.events import Event

TIMEOUT = 10.0
PAUSES = (1.0, 4.0, 16.0)
"""Pauses in seconds before the next tries."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects. A redirected POST becomes a GET, and its answer would count as a delivery."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


class Webhook:
    """Posts events as JSON, in order. An undelivered event is tried again, then dropped, with a warning each time."""

    def __init__(self, url: str, warn: Callable[[str], None], pauses: Sequence[float] = PAUSES):
        """`warn` is called with lines, also from the thread. Raises ConfigError if `url` isn't an HTTP address."""
        try:
            parts = urlsplit(url)
            host = parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
        except ValueError:
            host = None
        # The path is often a secret, so it isn't printed.
        if not host or "@" in parts.netloc or not url.isascii() or any(letter <= " " for letter in url):
            raise ConfigError(
                "webhook: not an HTTP address; write http://HOST/PATH or https://HOST/PATH, without a name and"
                " password, blanks and letters other than ASCII as %20 and so on"
            )
        self._url, self._warn, self._pauses = url, warn, pauses
        self._name = f"webhook {host}"
        self._waiting = queue.SimpleQueue[Event | None]()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._deliver, name="webhook", daemon=True)
        self._thread.start()

    def post(self, event: Event) -> None:
        """Queue the event for delivery and return at once."""
        self._waiting.put(event)

    def close(self, seconds: float = TIMEOUT) -> None:
        """Deliver the queued events, with one try each, for at most `seconds`; drop the others."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f"{self._name} doesn't answer: events that it didn't get yet are dropped")

    def _deliver(self) -> None:
        while event := self._waiting.get():
            for pause in (*self._pauses, None):
                reason = self._post(event)
                if reason is None:
                    break
                if pause is None or self._closing.is_set():
                    self._warn(f"{self._name}: {reason}; dropped: {event.text}")
                    break
                self._warn(f"{self._name}: {reason}; trying again in {pause:g} s: {event.text}")
                self._closing.wait(pause)

    def _post(self, event: Event) -> str | None:
        """The reason why the event wasn't delivered; None if it was."""
        request = urllib.request.Request(
            self._url, json.dumps(event.body()).encode(), {"Content-Type": "application/json", "User-Agent": "ddm-ray"}
        )
        try:
            with _OPENER.open(request, timeout=TIMEOUT):
                return None
        except urllib.error.HTTPError as error:
            return f"answered {error.code}"
        except Exception as error:  # watching goes on whatever a server or a proxy does
            return one_line(getattr(error, "reason", error))
