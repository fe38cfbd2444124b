"""Connections to Serve's proxy, and to replicas that listen: one that sends no whole head in time is ended.

They themselves wait for ever. The proxy loads this file and nothing else of ours, so neither torch nor Ray is imported.
"""

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 10.0
"""Seconds for a request's head, from the connection or, on one that has had a request, from its first byte."""


class BoundedConnection(HttpToolsProtocol):
    """A connection as uvicorn has it, with a time for heads of requests and errors in OpenAI's form."""

    head_s = HEAD_S
    _deadline: asyncio.TimerHandle | None = None
    _began = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._began = True
        if self._deadline is None:
            self._wait()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._began = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._stop_waiting()
        self._refuse(HTTPStatus.BAD_REQUEST, msg, "malformed_request")

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(self.head_s, self._end)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait()  # an answer to the request before is on its way
        elif self._began:
            text = f"the request's head wasn't here within {self.head_s:g} s"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, text, "request_timeout")
        else:
            # Browsers open connections in advance; an answer there would be taken for the next request's.
            self.transport.close()

    def _refuse(self, status: HTTPStatus, message: str, code: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def bound_connections() -> list[Any]:
    """Have this process's uvicorn make connections of this kind. Serve calls it; no middlewares."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedConnection.__name__}"
    return []
