"""What the gateway refuses, and what servers behind it refuse in words of their own: always OpenAI's error object."""

import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse

import pytest

from ddm_ray.serve.cluster import haproxy
from ddm_ray.serve.http.guard import Limits
from tests.serve.cluster.test_gateway import HAPROXY, Proxy, ask, standing
from tests.serve.conftest import free_port

pytestmark = [pytest.mark.skipif(HAPROXY is None, reason="HAProxy isn't installed"), pytest.mark.integration]

LARGE = Limits().body_bytes + 2**16
UNSOUND = {
    "words": b"words\r\n\r\n",
    "another protocol": bytes.fromhex("16030100c8010000c40303") + b"x" * 189,
    "another version": b"GET / HTTP/9.9\r\nHost: here\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "half of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nMS\r\n\r\n",
    "a space in the path": b"GET /a b HTTP/1.1\r\nHost: here\r\n\r\n",
    "a letter in the path": "GET /é HTTP/1.1\r\nHost: here\r\n\r\n".encode(),
    "a relative path": b"GET v1/models HTTP/1.1\r\nHost: here\r\n\r\n",
    "a tunnel": b"CONNECT here:443 HTTP/1.1\r\nHost: here\r\n\r\n",
    "a null byte": b"GET / HTTP/1.1\r\nHost: here\r\nX: a\0b\r\n\r\n",
    "a header without a name": b"GET / HTTP/1.1\r\nHost: here\r\n: a\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nHost: here\r\nX\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: here\r\nHost: there\r\n\r\n",
    "no host's name": b"GET / HTTP/1.1\r\nHost: he re\r\n\r\n",
    "another host": b"GET http://there/ HTTP/1.1\r\nHost: here\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "no length": b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: -1\r\n\r\nab",
    "an endless length": b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\nab",
    "another coding": b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: own\r\n\r\n",
    "no chunk": b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "no second chunk": b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\nzz\r\n\r\n",
    "a websocket": b"GET / HTTP/1.1\r\nHost: here\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    "a long path": b"GET /" + b"x" * LARGE + b" HTTP/1.1\r\nHost: here\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nHost: here\r\nX: " + b"x" * LARGE + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
}
SOUND = {
    "HTTP/1.0": b"GET /-/healthz HTTP/1.0\r\n\r\n",
    "a whole address": b"GET http://here:8000/-/healthz?x=y HTTP/1.1\r\nHost: here:8000\r\n\r\n",
    "an address of numbers": b"GET /-/healthz HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n",
    "an empty line before": b"\r\nGET /-/healthz HTTP/1.1\r\nHost: here\r\n\r\n",
    "a wish for HTTP/2": b"GET /-/healthz HTTP/1.1\r\nHost: here\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    "letters": "GET /-/healthz HTTP/1.1\r\nHost: here\r\nX:é\t\r\nY:\r\n\r\n".encode(),
    "chunks": b"POST /-/healthz HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"1;x\r\na\r\n0\r\nT: u\r\n\r\n",
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with Proxy(free_port()) as proxy, standing(proxy.server_port) as (_, number):
        yield number


def answered(port: int, *parts: bytes) -> tuple[int, bytes]:
    """Send these bytes as they are; the status and the body of the answer, which has to be JSON if it's a refusal."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        answer = HTTPResponse(connection)
        answer.begin()
        body = answer.read()
        assert answer.status == 200 or answer.headers.get_content_type() == "application/json", body
        return answer.status, body


@pytest.mark.parametrize("name", UNSOUND)
def test_a_request_that_cannot_be_read_is_refused_in_openais_form(port: int, name: str) -> None:
    status, body = answered(port, UNSOUND[name])
    assert status == (431 if "long" in name or "many" in name else 400)
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", SOUND)
def test_an_unusual_request_is_let_in(port: int, name: str) -> None:
    assert answered(port, SOUND[name])[0] == 200


def test_a_request_may_come_byte_by_byte(port: int) -> None:
    """In pieces, so that its head and its body aren't whole at first."""
    request = SOUND["chunks"]
    assert answered(port, *(request[at : at + 1] for at in range(len(request))))[0] == 200


def test_half_a_head_ends_in_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "LIMITS", Limits(body_seconds=1))
    with Proxy(free_port()) as proxy, standing(proxy.server_port) as (_, port):
        for half in (b"POST /v1/ima", b"POST / HTTP/1.1\r\nHost: here\r\n"):
            status, body = answered(port, half)
            assert status == 408 and json.loads(body)["error"]["code"] == "request_timeout"
    assert proxy.bodies == []


@pytest.mark.parametrize("status", [400, 403, 404, 405, 408, 413, 429, 431, 500, 503])
@pytest.mark.parametrize("kind", ["text/plain", "text/html"])
def test_a_servers_own_words_become_openais_object(status: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Serve's proxy, as where it knows no application, and of the server that it runs in."""
    monkeypatch.setattr(haproxy, "RETRIES", 1)
    proxy = Proxy(free_port(), status, status)
    proxy.kind = kind
    with proxy, standing(proxy.server_port) as (_, port):
        same, body = ask(port, b"Path not found. Ping http://10.0.0.7/-/routes")
    error = json.loads(body)["error"]
    assert same == status and b"10.0.0.7" not in body
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
