"""Many bodies at once that are too large, or come byte by byte: neither memory nor other clients pay for them."""

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddm_ray.serve.app import ServeArgs
from ddm_ray.serve.guard import Limits
from ddm_ray.storage.run import Run
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
        slow = [socket.create_connection(("127.0.0.1", server.port), timeout=120) for _ in range(SLOW)]
        for connection in slow:
            connection.sendall(head)
        ends, took = time.monotonic() + Limits().body_seconds / 2, []
        while time.monotonic() < ends:
            for connection in slow:
                connection.sendall(b" ")
            began = time.monotonic()
            assert server.generate(prompt="1").status == 200
            took.append(time.monotonic() - began)
        print(f"others waited {max(took):.2f} s at most, {len(took)} of them; memory +{(most - before) >> 20} MiB")
        assert {connection.recv(12) for connection in slow} == {b"HTTP/1.1 408"}
        assert server.generate(prompt="1").status == 200
