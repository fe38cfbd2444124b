"""Many that mean ill at once, with bodies too large or too slow: nobody else pays for them."""

import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ddm_ray.run.run import Run
from ddm_ray.serve.cluster.args import ServeArgs
from ddm_ray.serve.http.guard import Limits
from tests.serve.conftest import Server, served

LARGE, SLOW = 1000, 500
MOST_MEMORY = 100 << 20


def memory(server: Server) -> int:
    """Bytes of the ingress's replicas."""
    pages = [Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in server.replicas("ddm:api")]
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")


def body(size: int) -> bytes:
    empty = json.dumps({"prompt": "1", "user": ""}).encode()
    return empty[:-2] + b"x" * (size - len(empty)) + empty[-2:]


def others_wait(server: Server, meanwhile: Callable[[], None]) -> float:
    """The 99th percentile of the seconds that another client waits, for half as long as a body may take."""
    ends, took = time.monotonic() + Limits().body_seconds / 2, []
    while time.monotonic() < ends:
        meanwhile()
        began = time.monotonic()
        assert server.generate(prompt="1").status == 200
        took.append(time.monotonic() - began)
    return float(np.quantile(took, 0.99))


def test_many_bodies_cost_others_nothing(request: pytest.FixtureRequest, tiny_run: Run, tmp_path: Path) -> None:
    if not request.config.getoption("every_call"):
        pytest.skip("asked for by --every-call: a server, and a minute")
    with served(ServeArgs(run=tiny_run.url), tmp_path) as server:
        assert server.generate(prompt="1").status == 200
        before, most = memory(server), 0
        with ThreadPoolExecutor(50) as pool:
            asked = [
                pool.submit(server.ask, "POST", "/v1/images/generations", body(Limits().body_bytes + 1))
                for _ in range(LARGE)
            ]
            while not all(each.done() for each in asked):
                most = max(most, memory(server))
                time.sleep(0.1)
            statuses = [each.result().status for each in asked]
        assert statuses == [413] * LARGE
        assert most - before < MOST_MEMORY, f"{(most - before) >> 20} MiB"
        assert server.ask("POST", "/v1/images/generations", body(Limits().body_bytes)).status == 200

        head = b"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        alone = others_wait(server, lambda: None)
        slow = [socket.create_connection(("127.0.0.1", server.port), timeout=120) for _ in range(SLOW)]
        for connection in slow:
            connection.sendall(head)

        sent = [time.monotonic()]

        def go_on() -> None:
            if time.monotonic() - sent[-1] > 1.0:
                sent.append(time.monotonic())
                for connection in slow:
                    connection.sendall(b" ")

        beside = others_wait(server, go_on)
        print(f"others' p99: {beside:.3f} s, {alone:.3f} s alone; memory +{(most - before) >> 20} MiB")
        assert beside < 2 * alone
        assert {connection.recv(12) for connection in slow} == {b"HTTP/1.1 408"}
        assert server.generate(prompt="1").status == 200
