"""Velocities beside Serve: who is let in, and what crosses. Without Ray."""

import asyncio
import socket
from concurrent.futures import Future
from contextlib import suppress

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from zmq.auth import Authenticator
from zmq.utils.monitor import recv_monitor_message

from ddm_ray.serve.cluster import velocities
from ddm_ray.serve.cluster.velocities import Endpoint, VelocityClient
from tests.serve.cluster.linked import HOST, PATIENCE_S, Replica, echo, exchanged, ready, run, until, velocity


@given(requests=st.lists(st.binary(max_size=2**12), min_size=1, max_size=5))
def test_answers_come_in_turn(requests: list[bytes]) -> None:
    async def work() -> None:
        replica = Replica(echo)
        client = VelocityClient("expert", replica.invited)
        assert [await exchanged(client, request) for request in requests] == [request[::-1] for request in requests]
        replica.server.close()

    run(work)


def test_several_are_answered_at_once() -> None:
    async def work() -> None:
        begun = list[tuple[bytes, Future[Tensor]]]()

        def answer(request: bytes) -> Future[Tensor]:
            begun.append((request, Future()))
            if len(begun) == 3:  # the last first
                for own, future in reversed(begun):
                    future.set_result(velocity(own))
            return begun[-1][1]

        replica = Replica(answer)
        clients = [VelocityClient("expert", replica.invited) for _ in range(3)]
        each = [exchanged(client, bytes([number])) for number, client in enumerate(clients)]
        assert await asyncio.gather(*each) == [b"\0", b"\1", b"\2"]
        replica.server.close()

    run(work)


def events(stranger: "zmq.Socket[bytes]", endpoint: Endpoint) -> set[int]:
    """What becomes of a connection, until it ends."""
    monitor, seen = stranger.get_monitor_socket(), set[int]()
    stranger.reconnect_ivl, stranger.linger = -1, 0
    stranger.connect(endpoint[0])
    with suppress(zmq.Again):  # it may have ended by now
        stranger.send(b"x", zmq.NOBLOCK)
    ends = {zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_MONITOR_STOPPED}
    while not seen & ends:
        assert monitor.poll(1000 * PATIENCE_S)
        seen.add(recv_monitor_message(monitor)["event"])
    stranger.close()
    return seen


@pytest.mark.parametrize("kind", ["no key", "a password", "another's key", "a key of before", "another server's key"])
def test_strangers_are_not_let_in(kind: str) -> None:
    async def work() -> None:
        requests = list[bytes]()

        def answer(request: bytes) -> Future[Tensor]:
            requests.append(request)
            return ready(request)

        replica = Replica(answer)
        endpoint, keys = replica.server.endpoint, zmq.curve_keypair()
        response = replica.invited(keys[0])
        await anext(response)
        with zmq.Context() as context:
            stranger = context.socket(zmq.DEALER)
            if kind == "a password":
                stranger.plain_username, stranger.plain_password = b"expert", b"expert"
            elif kind != "no key":
                own, server_key = keys, endpoint[1]
                if kind == "another's key":
                    own = zmq.curve_keypair()
                elif kind == "a key of before":
                    response.cancel()
                    await until(lambda: not replica.server._answers)
                else:
                    server_key, _ = zmq.curve_keypair()
                stranger.curve_publickey, stranger.curve_secretkey, stranger.curve_serverkey = *own, server_key
            assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in await asyncio.to_thread(events, stranger, endpoint)
        assert not requests
        assert await exchanged(VelocityClient("expert", replica.invited), b"ab") == b"ab"
        assert requests == [b"ab"]
        replica.server.close()

    run(work)


def test_where_nothing_authenticates_nobody_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(authenticator: Authenticator) -> None:
        authenticator.zap_socket = authenticator.context.socket(zmq.REP)  # bound to nothing

    async def work() -> None:
        monkeypatch.setattr(Authenticator, "start", start)
        replica, (public_key, secret_key) = Replica(echo), zmq.curve_keypair()
        await anext(replica.invited(public_key))
        with zmq.Context() as context:
            client, endpoint = context.socket(zmq.DEALER), replica.server.endpoint
            client.curve_publickey, client.curve_secretkey = public_key, secret_key
            client.curve_serverkey = endpoint[1]
            assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in await asyncio.to_thread(events, client, endpoint)

    run(work)


def ended(connection: socket.socket) -> bool:
    """True once the other side has ended it, whatever it says before."""
    try:
        while connection.recv(2**12):
            pass
    except ConnectionError:
        pass
    return True


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
NOISE = {
    "nothing": b"",
    "noise": bytes(range(256)) * 64,
    "a greeting, and noise": GREETING + bytes(range(256)) * 64,
    "a huge message": GREETING + b"\x02" + (2**62).to_bytes(8, "big"),
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
def test_what_speaks_otherwise_is_let_go_and_keeps_nobody_out(
    noise: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        monkeypatch.setattr(velocities, "CONNECT_MS", 200)
        replica = Replica(echo)
        monkeypatch.undo()
        port = int(replica.server.endpoint[0].rpartition(":")[2])
        connections = [socket.create_connection((HOST, port), PATIENCE_S) for _ in range(8)]
        for connection in connections:
            connection.sendall(noise)
        assert await exchanged(VelocityClient("expert", replica.invited), b"ab") == b"ba"
        for connection in connections:
            with connection:
                assert await asyncio.to_thread(ended, connection)
        replica.server.close()

    run(work)
    assert not caplog.records


@pytest.mark.parametrize("side", ["request", "answer"])
def test_too_long_a_message_ends_its_connection_alone(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        def answer(request: bytes) -> Future[Tensor]:
            return ready(b"x" if side == "request" else request)

        monkeypatch.setattr(velocities, "MAX_BYTES", 2**16)
        replica = Replica(answer)
        other = VelocityClient("expert", replica.invited)
        assert await exchanged(other, b"x")
        client = VelocityClient("expert", replica.invited)
        assert await exchanged(client, bytes(2 ** (17 if side == "request" else 15))) is None
        assert await exchanged(client, b"x")
        assert await exchanged(other, b"x")
        replica.server.close()

    run(work)


@pytest.mark.parametrize("how", ["at once", "later", "cancelled"])
def test_what_cannot_be_answered_is_to_be_asked_through_serve(how: str) -> None:
    async def work() -> None:
        def answer(request: bytes) -> Future[Tensor]:
            if request != b"x":
                return ready(request)
            if how == "at once":
                raise ValueError("no call of this mixture")
            future = Future[Tensor]()
            if how == "later":
                future.set_exception(KeyError("weights"))
            else:
                future.cancel()  # as an engine does that closes
            return future

        client = VelocityClient("expert", Replica(answer).invited)
        assert [await exchanged(client, request) for request in (b"x", b"y", b"x")] == [None, b"y", None]
        assert client._link is not None

    run(work)
