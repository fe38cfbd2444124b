"""Connections that send too little, in this process: they end, and others don't notice. No Ray."""

import json
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
import uvicorn
from uvicorn.config import HTTP_PROTOCOLS

from ddm_ray.serve import connections
from ddm_ray.serve.connections import BoundedConnection, bound_connections
from ddm_ray.serve.guard import Guard, Limits
from tests.conftest import wait_for

GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


class Impatient(BoundedConnection):
    head_s = 1.0


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server as Serve's proxy starts it, behind whose connections the door stands at once."""
    guard = Guard(answer, limits=Limits(body_seconds=1.0))
    config = uvicorn.Config(guard, port=0, http=Impatient, lifespan="off", log_config=None, timeout_keep_alive=600)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started, 30)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def sent(port: int, *parts: bytes) -> bytes:
    """What comes until the end on a connection that sent this and no more."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        answered = b""
        while data := connection.recv(4096):
            answered += data
    return answered


def error_of(answered: bytes) -> tuple[int, str]:
    head, _, body = answered.partition(b"\r\n\r\n")
    assert b"Content-Type: application/json" in head or b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


@pytest.mark.parametrize("head", [b"G", b"GET / HTTP/1.1\r\nHost: here\r\nX-Some", b"\r\n\r\nPOST / HTTP/1.1\r\n"])
def test_half_a_head_ends_in_408(port: int, head: bytes) -> None:
    assert error_of(sent(port, head)) == (408, "request_timeout")


def test_half_a_body_ends_in_408(port: int) -> None:
    answered = sent(port, b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 10\r\n\r\n{")
    assert error_of(answered) == (408, "request_timeout")


def test_one_that_sends_nothing_is_closed(port: int) -> None:
    assert sent(port) == b""


def test_half_a_head_after_a_request_ends_in_408(port: int) -> None:
    first, second = sent(port, GET, b"GET / HT").split(b"ok", 1)
    assert first.startswith(b"HTTP/1.1 200") and error_of(second) == (408, "request_timeout")


def test_what_is_no_request_is_refused_in_openais_form(port: int) -> None:
    assert error_of(sent(port, b"\0\1\2\r\n\r\n")) == (400, "malformed_request")


def test_a_connection_that_had_a_request_may_rest(port: int) -> None:
    """It is uvicorn's to end, later."""
    resting = HTTPConnection("127.0.0.1", port, timeout=60)
    for _ in range(2):
        resting.request("GET", "/")
        assert resting.getresponse().read() == b"ok"
        assert sent(port) == b""  # which waits for longer than a head may take
    resting.close()


def test_many_at_once_all_end_and_harm_nobody(port: int) -> None:
    heads = [b"", b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 10\r\n\r\n{"]
    waiting = []
    for number in range(300):
        waiting.append(socket.create_connection(("127.0.0.1", port), timeout=60))
        waiting[-1].sendall(heads[number % 3])
    assert sent(port, GET.replace(b"Host", b"Connection: close\r\nHost")).endswith(b"ok")
    starts = [connection.recv(12) for connection in waiting]
    assert starts == [b"", b"HTTP/1.1 408", b"HTTP/1.1 408"] * 100
    for connection in waiting:
        connection.close()


def test_the_proxy_makes_connections_of_this_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    assert bound_connections() == []
    config = uvicorn.Config(answer)
    config.load()
    assert config.http_protocol_class is connections.BoundedConnection and BoundedConnection.head_s == 10
