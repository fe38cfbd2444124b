"""The gateway by itself: the real HAProxy before small servers that die, answer 500, or aren't there."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.errors import ServeError
from ddm_ray.serve.cluster import gateway, haproxy
from ddm_ray.serve.cluster.addresses import Address
from ddm_ray.serve.cluster.gateway import Gateway, run_gateway
from ddm_ray.serve.cluster.haproxy import find_haproxy
from ddm_ray.serve.http.guard import OWN_FAULT, Limits
from tests.conftest import wait_for
from tests.processes import command
from tests.serve.conftest import free_port

HAPROXY = find_haproxy()
pytestmark = [pytest.mark.skipif(HAPROXY is None, reason="HAProxy isn't installed"), pytest.mark.integration]


class Proxy(ThreadingHTTPServer):
    """In place of Serve's proxy or a replica: answers each request by the next of `acts`, a status or None for its end.

    With `ends` it ends itself there, and not the connection alone. While `held` is clear no request is answered. `kind`
    of its answers: JSON, as our replicas'.
    """

    daemon_threads, kind = True, "application/json"

    def __init__(self, port: int, *acts: int | None, ends: bool = False):
        super().__init__(("127.0.0.1", port), _Handler)
        self.acts, self.ends, self.bodies = list(acts), ends, list[bytes]()
        self.held = threading.Event()
        self.held.set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def leave(self) -> None:
        self.shutdown()  # first: whoever polls a closed socket never rests
        self.server_close()

    def __exit__(self, *_: object) -> None:
        self.leave()


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        if self.path == haproxy.HEALTH:
            return self._answer(200, b"")
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.bodies.append(body)
        self.server.held.wait(60)
        act = self.server.acts.pop(0) if self.server.acts else 200
        if act is None:
            if self.server.ends:
                self.server.leave()
            self.close_connection = True
            self.connection.close()
            return None
        return self._answer(act, body)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", self.server.kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def standing(*ports: int, replicas: Callable[[], Sequence[Address]] = tuple) -> Iterator[tuple[Gateway, int]]:
    assert HAPROXY is not None
    port = free_port()
    with closing(Gateway("127.0.0.1", port, [("127.0.0.1", each) for each in ports], HAPROXY)) as own:
        own.start(replicas)
        yield own, port


def ask(port: int, body: bytes = b"a request", connection: HTTPConnection | None = None) -> tuple[int, bytes]:
    connection = connection or HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/images/generations", body)
    answer = connection.getresponse()
    return answer.status, answer.read()


@pytest.mark.parametrize("acts", [(500, 500), (None, 500, None)])
def test_what_a_dead_process_took_with_it_is_asked_again(acts: tuple[int | None, ...]) -> None:
    """Also the largest body that is allowed, and also by a client that has asked before."""
    body = os.urandom(Limits().body_bytes)
    proxy = Proxy(free_port(), 200, *acts)
    with proxy, standing(proxy.server_port) as (_, port):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        assert ask(port, b"first", connection) == (200, b"first")
        assert ask(port, body, connection) == (200, body)
    assert proxy.bodies == [b"first", *[body] * (len(acts) + 1)]


@pytest.mark.parametrize("status", [408, 429, 503])
def test_any_other_answer_is_passed_on(status: int) -> None:
    proxy = Proxy(free_port(), status)
    with proxy, standing(proxy.server_port) as (_, port):
        assert ask(port) == (status, b"a request")
    assert len(proxy.bodies) == 1


def test_a_fault_that_would_come_again_is_told_at_once() -> None:
    proxy = Proxy(free_port(), OWN_FAULT)
    with proxy, standing(proxy.server_port) as (_, port):
        assert ask(port) == (500, b"a request")
    assert len(proxy.bodies) == 1


def test_of_two_proxies_one_may_die() -> None:
    proxies = [Proxy(free_port()) for _ in range(2)]
    with standing(*(each.server_port for each in proxies)) as (_, port):
        assert [ask(port)[0] for _ in range(4)] == [200] * 4
        assert all(each.bodies for each in proxies)
        proxies[0].leave()
        assert [ask(port)[0] for _ in range(4)] == [200] * 4
    proxies[1].leave()


def test_a_proxy_is_waited_for() -> None:
    """A request in flight as it dies, by a client that has asked before, waits for the next one."""
    number = free_port()
    proxy, later = Proxy(number, 200, None), list[Proxy]()
    with standing(number) as (_, port):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        assert ask(port, b"first", connection)[0] == 200
        proxy.leave()
        threading.Timer(1.5, lambda: later.append(Proxy(number))).start()
        assert ask(port, b"second", connection) == (200, b"second")
    later[0].leave()


def test_where_no_proxy_comes_that_is_told_in_openais_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(haproxy, "RETRIES", 1)
    with standing(free_port()) as (_, port):
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        status, body = ask(port, connection=connection)
    error = json.loads(body)["error"]
    assert status == 503 and error["type"] == "server_error" and error["code"] == "unavailable"


def test_half_a_request_ends_in_408(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that sends nothing ends without a word, as browsers open some ahead; neither holds up anybody."""
    monkeypatch.setattr(haproxy, "LIMITS", Limits(body_seconds=1))
    proxy = Proxy(free_port())
    with proxy, standing(proxy.server_port) as (_, port):
        silent, half = (socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(2))
        half.sendall(b"POST /v1/images/generations HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n{")
        assert ask(port)[0] == 200
        assert silent.recv(100) == b""
        answer = half.recv(1000)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert proxy.bodies == [b"a request"]


def test_it_leads_to_replicas_and_to_proxies_only_while_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come and go are followed, also while HAProxy is started again, and while nobody knows of them."""
    proxy, one, two = (Proxy(free_port()) for _ in range(3))
    listen: list[Proxy] | None = []

    def addresses() -> list[Address]:
        if listen is None:
            raise RuntimeError("the controller is away")
        return [("127.0.0.1", each.server_port) for each in listen]

    def asked(*others: Proxy) -> bool:
        """True if one more request reaches each of these, and nobody else."""
        before = [len(each.bodies) for each in (proxy, one, two)]
        assert [ask(port)[0] for _ in others] == [200] * len(others)
        after = [len(each.bodies) for each in (proxy, one, two)]
        more = [each in others for each in (proxy, one, two)]
        return [now - then for now, then in zip(after, before, strict=True)] == more

    monkeypatch.setattr(gateway, "FOLLOW_S", 0.05)
    with proxy, one, two, standing(proxy.server_port, replicas=addresses) as (own, port):
        assert asked(proxy)
        listen = [one]
        wait_for(lambda: asked(one), 30)
        listen = [one, two]
        wait_for(lambda: asked(one, two), 30)
        listen = None
        before = own.pid
        assert before is not None and asked(one, two)
        os.kill(before, signal.SIGKILL)
        assert ask(port)[0] == 200 and own.pid != before
        assert asked(one, two)
        listen = [two]
        wait_for(lambda: asked(two), 30)
        listen = []
        wait_for(lambda: asked(proxy), 30)
    assert own.pid is None


def test_it_looks_for_nothing_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """HAProxy's end wakes it: an idle gateway takes no time."""
    monkeypatch.setattr(gateway, "FOLLOW_S", 3600.0)
    proxy = Proxy(free_port())
    with proxy, standing(proxy.server_port) as (own, port):
        for _ in range(2):
            before = own.pid
            assert before is not None and ask(port)[0] == 200
            os.kill(before, signal.SIGKILL)
            wait_for(lambda before=before: own.pid not in (None, before), 30)
        assert ask(port)[0] == 200


@pytest.mark.parametrize("count", [1, 3])
def test_what_was_in_flight_on_replicas_that_die_goes_by_the_proxy(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, also where all die of it and nobody knows yet that they are gone: the proxy waits for the next one."""
    monkeypatch.setattr(gateway, "FOLLOW_S", 0.05)
    proxy, replicas = Proxy(free_port()), [Proxy(free_port(), ends=True) for _ in range(count)]
    listen = [("127.0.0.1", each.server_port) for each in replicas]
    with proxy, standing(proxy.server_port, replicas=lambda: listen) as (_, port):
        wait_for(lambda: ask(port)[0] == 200 and all(each.bodies for each in replicas), 30)
        proxy.bodies.clear()
        for each in replicas:
            each.acts = [None]
        assert ask(port, b"in flight") == (200, b"in flight")
        assert [each.bodies[-1] for each in (*replicas, proxy)] == [b"in flight"] * (count + 1)
        assert ask(port, b"later") == (200, b"later")


@pytest.mark.parametrize("leads_to", ["proxies", "replicas"])
def test_who_comes_at_the_end_is_refused_at_once_and_what_is_in_flight_is_answered(leads_to: str) -> None:
    """Also by a HAProxy that is started again meanwhile, and whether or not somebody is still there to ask."""
    servers = [Proxy(free_port()) for _ in range(2)]
    ports = [each.server_port for each in servers]
    with ExitStack() as stack:
        if leads_to == "proxies":
            own, port = stack.enter_context(standing(*ports))
        else:
            listen = [("127.0.0.1", each) for each in ports[1:]]
            own, port = stack.enter_context(standing(ports[0], replicas=lambda: listen))
            wait_for(lambda: ask(port)[0] == 200 and servers[1].bodies, 30)
        for each in servers:
            each.held.clear()
            each.bodies.clear()
        in_flight = list[tuple[int, bytes]]()
        asking = threading.Thread(target=lambda: in_flight.append(ask(port, b"in flight")))
        asking.start()
        wait_for(lambda: any(each.bodies for each in servers), 30)
        own.refuse()
        status, body = ask(port)
        assert status == 503 and json.loads(body)["error"]["code"] == "unavailable"
        for each in servers:
            each.held.set()
        asking.join()
        assert in_flight == [(200, b"in flight")]
        assert own.pid is not None
        os.kill(own.pid, signal.SIGKILL)
        assert ask(port)[0] == 503
        for each in servers:
            each.leave()
        assert ask(port)[0] == 503 and sum(len(each.bodies) for each in servers) == 1


PARENT = """
import sys, time
from ddm_ray.serve.cluster.gateway import Gateway
from ddm_ray.serve.cluster.haproxy import find_haproxy
gateway = Gateway("127.0.0.1", int(sys.argv[1]), [("127.0.0.1", 1)], find_haproxy())
gateway.start()
while gateway.pid is None: time.sleep(0.01)
print(gateway.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(free_port())], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert "haproxy" in command(pid)
    parent.kill()
    parent.wait()
    wait_for(lambda: not command(pid), 30)


@pytest.mark.parametrize(
    ("acts", "words"),
    [
        ((401, 200), "could ask .* for images without a token"),
        ((401, 503), "answers 503, so it isn't known"),
        ((401, None), "doesn't answer, so it isn't known"),
        ((401, 401), "is in use"),  # it is, and nothing else is wrong
    ],
)
def test_others_are_let_in_only_where_all_ask_for_a_token(acts: tuple[int | None, ...], words: str) -> None:
    proxies = [Proxy(free_port(), act) for act in acts]
    with ExitStack() as stack:
        for each in proxies:
            stack.enter_context(each)
        taken = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        with pytest.raises(ServeError, match=words):
            run_gateway([("127.0.0.1", each.server_port) for each in proxies], "0.0.0.0", taken.getsockname()[1])


@pytest.mark.parametrize(
    ("proxy", "program", "words"),
    [
        (("no.such.host.invalid", 1), HAPROXY, "could not resolve address"),
        (("127.0.0.1", 1), "/no/haproxy", "No such file"),
    ],
)
def test_a_gateway_that_cant_run_says_why(proxy: tuple[str, int], program: str, words: str) -> None:
    own = Gateway("127.0.0.1", free_port(), [proxy], program)
    with pytest.raises(ServeError, match=f"the gateway doesn't start: .*{words}"):
        own.start()


@pytest.mark.parametrize("proxy", ["node-1", ":8000", "node-1:99999", "node-1:http"])
def test_a_proxy_without_host_or_port_is_refused(proxy: str) -> None:
    done = CliRunner().invoke(main, ["gateway", proxy])
    assert done.exit_code == 1 and "give its host and port" in done.output
