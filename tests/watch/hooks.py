"""A webhook's server on loopback that keeps what it is sent, and may refuse some of it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hook:
    """The server's address, what it was sent, and how many requests it still refuses."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    refusals: int = 0

    @property
    def events(self) -> list[tuple[str, str]]:
        """(artifact, event) of all that it took."""
        return [(body["artifact"], body["event"]) for body in self.bodies]


@contextmanager
def hook_server(refusals: int = 0) -> Iterator[Hook]:
    """A running server at `url`; it answers 503 to the first `refusals` requests."""
    hook = Hook(refusals=refusals)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Content-Type"] == "application/json"
            status = 200
            if hook.refusals:
                hook.refusals, status = hook.refusals - 1, 503
            else:
                hook.bodies.append(body)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hook.url = f"http://127.0.0.1:{server.server_address[1]}/secret"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hook
        finally:
            server.shutdown()
