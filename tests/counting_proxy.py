"""A proxy before an S3 server that counts what is asked of it, by kind of request, and the bytes that pass."""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

# Of the connection to one neighbour, not of what is asked; and lengths, which are set anew.
OWN_HEADERS = {"connection", "transfer-encoding", "content-length", "date", "server"}


@dataclass(frozen=True)
class Asked:
    """One request: its kind (LIST, GET, HEAD, PUT, POST, DELETE), the key in its bucket, and bytes of both bodies."""

    kind: str
    key: str
    sent: int
    received: int


@dataclass
class Wire:
    """What has passed so far, in its order."""

    url: str
    asked: list[Asked] = field(default_factory=list)

    def counts(self, since: int = 0, part: str = "") -> Counter[str]:
        """Number of requests by kind, from the one numbered `since` on, whose key contains `part`."""
        return Counter(one.kind for one in self.asked[since:] if part in one.key)


@contextmanager
def counting_proxy(server: str) -> Iterator[Wire]:
    """A proxy before the S3 server at a URL, which this process's environment leads to meanwhile."""
    place = urlsplit(server).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            self.upstream = HTTPConnection(place)

        def finish(self) -> None:
            self.upstream.close()
            super().finish()

        def log_message(self, *_: object) -> None:
            pass

        def _pass_on(self) -> None:
            body = self._body()
            headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN_HEADERS}
            self.upstream.request(self.command, self.path, body or None, headers | {"Content-Length": str(len(body))})
            answer = self.upstream.getresponse()
            content = answer.read()
            where = urlsplit(self.path)
            key = unquote(where.path).strip("/").partition("/")[2]
            kind = "LIST" if self.command == "GET" and not key else self.command
            wire.asked.append(Asked(kind, key, len(body), len(content)))
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in OWN_HEADERS - {"date"}:
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    wire = Wire(f"http://127.0.0.1:{proxy.server_address[1]}")
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    before, os.environ["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"], wire.url
    try:
        yield wire
    finally:
        os.environ["AWS_ENDPOINT_URL"] = before
        proxy.shutdown()
        thread.join()
        proxy.server_close()
