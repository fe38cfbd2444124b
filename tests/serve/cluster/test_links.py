"""Links: which replica they lead to, when they are replaced, and how they end. Without Ray."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager

import pytest
import zmq
from torch import Tensor

from ddm_ray.serve.cluster import velocities
from ddm_ray.serve.cluster.velocities import Endpoint, VelocityClient, VelocityServer
from tests.serve.cluster.linked import (
    PATIENCE_S,
    Replica,
    Response,
    asked,
    echo,
    exchanged,
    ready,
    run,
    soon,
    until,
    velocity,
)

pytestmark = pytest.mark.integration


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no link asks for one soon."""
    monkeypatch.setattr(velocities, "RETRY_S", 0.001)
    monkeypatch.setattr(velocities, "MAX_RETRY_S", 0.01)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.usefixtures("at_once")
def test_an_answer_that_comes_late_is_no_other_ones(waits: bool) -> None:
    async def work() -> None:
        late = Future[Tensor]()

        def answer(request: bytes) -> Future[Tensor]:
            return late if request == b"late" else ready(request)

        client = VelocityClient("expert", Replica(answer).invited)
        await asked(client, b"late")
        if waits:
            assert await asyncio.to_thread(client.answer, time.monotonic() + 0.05) is None
        late.set_result(velocity(b"late"))
        for number in range(20):
            assert await exchanged(client, bytes([number])) == bytes([number])

    run(work)


def test_an_answer_for_a_client_that_has_gone_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        late, begun = Future[Tensor](), list[bytes]()

        def answer(request: bytes) -> Future[Tensor]:
            begun.append(request)
            return late if request == b"late" else ready(request)

        replica = Replica(answer)
        client = VelocityClient("expert", replica.invited)
        await asked(client, b"late")
        await until(lambda: begun)
        client._drop()
        late.set_result(velocity(b"late"))
        assert await exchanged(VelocityClient("expert", replica.invited), b"ab") == b"ab"
        replica.server.close()

    run(work)
    assert not caplog.records


SERVER = """
import asyncio, sys
from concurrent.futures import Future
import torch
from ddm_ray.serve.cluster.velocities import VelocityServer

async def serve():
    def answer(request):
        future = Future()
        if request != b"late":
            future.set_result(torch.tensor(list(request)))
        return future

    server = VelocityServer("127.0.0.1")
    async for endpoint in server.admit(sys.argv[1].encode(), answer):
        print(endpoint[0], endpoint[1].decode(), flush=True)

asyncio.run(serve())
"""


@contextmanager
def process(client_key: bytes) -> Iterator[tuple[Endpoint, subprocess.Popen[str]]]:
    """A server in a process of its own, which lets in the client with this key."""
    command = [sys.executable, "-c", SERVER, client_key.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        endpoint, public_key = server.stdout.readline().split()
        try:
            yield (endpoint, public_key.encode()), server
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("fault", "when"),
    [
        (signal.SIGKILL, "while it is waited for"),
        (signal.SIGSTOP, "while it is waited for"),
        (signal.SIGKILL, "before"),
    ],
)
def test_a_replica_that_dies_or_is_silent_is_noticed(fault: signal.Signals, when: str) -> None:
    """Long before the time for an answer is over; stopped, it is as a machine without a network."""

    async def work() -> None:
        with ExitStack() as stack:
            started = list[subprocess.Popen[str]]()

            async def link(client_key: bytes) -> AsyncIterator[Endpoint]:
                endpoint, server = await asyncio.to_thread(stack.enter_context, process(client_key))
                started.append(server)
                yield endpoint

            client = VelocityClient("expert", lambda client_key: Response(link(client_key)))
            assert await exchanged(client, b"ab") == b"ab"
            if when == "before":
                os.kill(started[0].pid, fault)
                await until(lambda: client._link is None or not client._link.socket.get(zmq.EVENTS) & zmq.POLLOUT)
                assert not client.ask(b"ab")
            else:
                await asked(client, b"late")
                deadline = soon()
                answer = asyncio.ensure_future(asyncio.to_thread(client.answer, deadline))
                os.kill(started[0].pid, fault)
                assert await answer is None and time.monotonic() < deadline

    run(work)


def test_a_link_is_replaced_so_that_all_replicas_have_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those before are let in no longer."""
    monkeypatch.setattr(velocities, "RENEW_S", 0.0)
    servers = list[VelocityServer]()

    async def work() -> None:
        replicas, num_asked = [Replica(lambda _: ready(b"1")), Replica(lambda _: ready(b"2"))], 0
        servers.extend(replica.server for replica in replicas)

        def invited(client_key: bytes) -> Response:
            nonlocal num_asked
            num_asked += 1
            return replicas[num_asked % 2].invited(client_key)

        client = VelocityClient("expert", invited)
        answers, deadline = set[bytes | None](), soon()
        while answers != {b"1", b"2"} or num_asked < 5:
            assert time.monotonic() < deadline
            answers.add(await exchanged(client, b"x"))
        # The one that is used, and the next.
        await until(lambda: sum(len(server._answers) for server in servers) <= 2)

    run(work)
    for server in servers:
        server.close()


def test_without_a_link_it_is_asked_for_once_at_a_time() -> None:
    async def work() -> None:
        replica = Replica(echo)
        client = VelocityClient("expert", replica.invited)
        assert [client.ask(b"x") for _ in range(5)] == [False] * 5
        assert await exchanged(client, b"ab") == b"ba"
        assert len(replica.responses) == 1
        replica.server.close()

    run(work)


def test_who_asks_nothing_is_let_in_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an expert that nobody asks can be scaled to zero."""
    monkeypatch.setattr(velocities, "IDLE_S", 0.2)

    async def work() -> None:
        replica = Replica(echo)
        client = VelocityClient("expert", replica.invited)
        assert await exchanged(client, b"ab") == b"ba"
        await until(lambda: not replica.server._answers)
        assert await exchanged(client, b"ab") is None

    run(work)


@pytest.mark.usefixtures("at_once")
def test_a_link_that_cant_be_had_is_told_once_and_asked_for_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        replica, responses = Replica(echo), list[Response]()

        async def nowhere() -> AsyncIterator[Endpoint]:
            yield "tcp://127.0.0.1:1", replica.server.endpoint[1]  # where nothing listens

        def invited(client_key: bytes) -> Response:
            lost = len(responses) < 2
            responses.append(Response(nowhere()) if lost else replica.invited(client_key))
            return responses[-1]

        client = VelocityClient("expert", invited)
        monkeypatch.setattr(velocities, "CONNECT_MS", 50)
        await until(lambda: not client.ask(b"x") and len(responses) > 1 and responses[1].is_cancelled)
        monkeypatch.setattr(velocities, "CONNECT_MS", 1000 * int(PATIENCE_S))
        assert await exchanged(client, b"ab") == b"ba"
        assert [response.is_cancelled for response in responses[:3]] == [True, True, False]
        replica.server.close()

    run(work)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["no link to expert, so calls cross by Serve: no connection to tcp://127.0.0.1:1"]
