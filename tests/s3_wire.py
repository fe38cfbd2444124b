"""A proxy before an S3 server, which counts requests and misbehaves as it is told."""

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Fault(Enum):
    """What may happen to a request."""

    DROPPED = "the connection ends before the request is heeded"
    HANGS = "the request is taken, and never heeded or answered"
    LOST = "the request is heeded, and its answer lost"
    BELIED = "the request is heeded, and answered with 500 InternalError"
    UNAVAILABLE = "503 SlowDown"
    BROKEN = "500 InternalError"
    DENIED = "403 AccessDenied"
    KEYS_DENIED = "200, and AccessDenied for each key that was to be deleted"
    CONFLICT = "409 ConditionalRequestConflict"
    UNCONDITIONAL = "If-None-Match isn't heeded"


_SIGNED, _DELETED = re.compile("Credential=([^/]+)/"), re.compile("<Key>([^<]*)</Key>")
LENGTHS = ("content-length", "transfer-encoding")
ERRORS = {
    Fault.UNAVAILABLE: (503, "SlowDown"),
    Fault.BROKEN: (500, "InternalError"),
    Fault.BELIED: (500, "InternalError"),
    Fault.DENIED: (403, "AccessDenied"),
    Fault.CONFLICT: (409, "ConditionalRequestConflict"),
}


@dataclass(frozen=True)
class Request:
    """A request that was made: when, by the monotonic clock, of what, its body's bytes, and what happened to it.

    `who`: the id of the key that it is signed with. `deletes`: keys that a request of the bucket is to delete.
    `answered`: bytes of the answer's body, and `status`: the server's, once it is sent.
    """

    at: float
    method: str
    path: str
    conditional: bool
    sent: int = 0
    fault: Fault | None = None
    answered: int = 0
    status: int = 0
    who: str = ""
    deletes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Key in its bucket; empty for a request of the bucket itself."""
        return self.path.partition("?")[0].strip("/").partition("/")[2]

    @property
    def kind(self) -> str:
        """LIST, GET, HEAD, PUT, POST or DELETE, as one pays for them."""
        return "LIST" if self.method == "GET" and not self.key else self.method

    def matches(self, pattern: str) -> bool:
        """True if `METHOD /bucket/key` has the pattern in it."""
        return re.search(pattern, f"{self.method} {self.path}") is not None


class Wire:
    """The proxy. `rule` says what happens to a request; whatever it answers, one at a time asks it."""

    def __init__(self, server: str, host: str = "127.0.0.1"):
        self.rule: Callable[[Request], Fault | None] = lambda _: None
        self.requests: list[Request] = []
        self._server = urlsplit(server).netloc
        self._lock, self._ended = threading.Lock(), threading.Event()
        wire = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

            def pass_on(self) -> None:
                wire.handle(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

        self._http = ThreadingHTTPServer((host, 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://{host}:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        """Take no more requests, and let go of those that hang."""
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()

    def refused(self) -> list[Request]:
        """The requests that a fault befell."""
        return [request for request in self.requests if request.fault]

    def counts(self, since: int = 0) -> Counter[str]:
        """Number of requests by kind, from the one numbered `since` on."""
        return Counter(request.kind for request in self.requests[since:])

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """Pass a request on, unless its fault says otherwise."""
        body = _body(handler)
        facts = handler.command, unquote(handler.path), "If-None-Match" in handler.headers, len(body)
        signed = _SIGNED.search(handler.headers.get("Authorization", ""))
        deletes = tuple(_DELETED.findall(body.decode())) if handler.path.endswith("?delete") else ()
        with self._lock:
            request = Request(time.monotonic(), *facts, who=signed[1] if signed else "", deletes=deletes)
            fault = self.rule(request)
            number = len(self.requests)
            self.requests.append(replace(request, fault=fault))
        if fault is Fault.HANGS:
            self._ended.wait(60)
        if fault in (Fault.DROPPED, Fault.HANGS):
            handler.close_connection = True
            return
        if fault is Fault.BELIED:
            self._forward(handler, body, True)
        if fault in ERRORS:
            status, code = ERRORS[fault]
            self._answer(handler, status, {}, f"<Error><Code>{code}</Code></Error>".encode())
            return
        if fault is Fault.KEYS_DENIED:
            why = b"</Key><Code>AccessDenied</Code><Message>Access Denied</Message>"
            for asked, answered in ((b"Delete", b"DeleteResult"), (b"Object>", b"Error>"), (b"</Key>", why)):
                body = body.replace(asked, answered)
            self._answer(handler, 200, {}, body)
            return
        status, headers, answer = self._forward(handler, body, fault is not Fault.UNCONDITIONAL)
        if fault is Fault.LOST:
            handler.close_connection = True
            return
        read = 0 if handler.command == "HEAD" else len(answer)
        self.requests[number] = replace(self.requests[number], answered=read, status=status)
        self._answer(handler, status, headers, answer)

    def _forward(
        self, handler: BaseHTTPRequestHandler, body: bytes, conditional: bool
    ) -> tuple[int, dict[str, str], bytes]:
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in LENGTHS}
        headers["Content-Length"] = str(len(body))
        if not conditional:
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        server = HTTPConnection(self._server, timeout=60)
        try:
            server.request(handler.command, handler.path, body, headers)
            response = server.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            server.close()

    def _answer(self, handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
        handler.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", *LENGTHS):
                handler.send_header(name, value)
        # A HEAD's is that of the object.
        length = next((value for name, value in headers.items() if name.lower() == "content-length"), str(len(body)))
        handler.send_header("Content-Length", length if handler.command == "HEAD" else str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)


def _body(handler: BaseHTTPRequestHandler) -> bytes:
    if handler.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    chunks = []
    while size := int(handler.rfile.readline().split(b";")[0], 16):
        chunks.append(handler.rfile.read(size))
        handler.rfile.readline()
    handler.rfile.readline()
    return b"".join(chunks)


@contextmanager
def wire(server: str, host: str = "127.0.0.1") -> Iterator[Wire]:
    """A proxy before the server at a URL, which listens at an address of this machine."""
    opened = Wire(server, host)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def leading_through(server: str, host: str = "127.0.0.1") -> Iterator[Wire]:
    """A proxy before the server at a URL, which this process's environment leads to meanwhile."""
    with wire(server, host) as opened:
        before, os.environ["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"], opened.url
        try:
            yield opened
        finally:
            os.environ["AWS_ENDPOINT_URL"] = before
