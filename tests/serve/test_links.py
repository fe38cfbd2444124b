"""Links: who is let in, what crosses, and how a connection ends. Without Ray."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_ray.serve.links import KEY_BYTES, LENGTH, MOST_BYTES, Address, Link, LinkServer, Wait

HOST, PATIENCE_S = "127.0.0.1", 30.0


@pytest.fixture
def server() -> Iterator[LinkServer]:
    server = LinkServer(HOST, idle_s=600.0)
    yield server
    server.close()


def soon() -> float:
    """A time of the monotonic clock that is far off enough."""
    return time.monotonic() + PATIENCE_S


def echo(request: bytes, wait: Wait) -> bytes:
    return request[::-1]


def raw(address: Address) -> socket.socket:
    """A connection of somebody who speaks for themselves."""
    connection = socket.create_connection((address.host, address.port), PATIENCE_S)
    connection.settimeout(PATIENCE_S)
    assert len(connection.recv(KEY_BYTES, socket.MSG_WAITALL)) == KEY_BYTES
    return connection


def ended(connection: socket.socket) -> bool:
    """True once the other side has ended it, without a word."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def refused(link: Link) -> bool:
    """True if a request isn't answered, since the other side ended the connection."""
    try:
        link.send(b"x", soon())
        link.receive(soon())
    except ConnectionError:
        return True
    return False


@given(requests=st.lists(st.binary(max_size=2**17), min_size=1, max_size=5))
def test_answers_come_in_turn(requests: list[bytes]) -> None:
    server = LinkServer(HOST)
    invitation = server.invite(echo)
    link = Link(invitation.address)
    for request in requests:
        link.send(request, soon())
        assert link.receive(soon()) == request[::-1]
    link.close()
    invitation.ended.result(PATIENCE_S)
    server.close()


def test_several_are_answered_at_once(server: LinkServer) -> None:
    both = threading.Barrier(2, timeout=PATIENCE_S)

    def answer(request: bytes, wait: Wait) -> bytes:
        both.wait()
        return request

    links = [Link(server.invite(answer).address) for _ in range(2)]
    for link in links:
        link.send(b"x", soon())
    assert [link.receive(soon()) for link in links] == [b"x", b"x"]


def test_strangers_are_told_nothing(server: LinkServer) -> None:
    requests = list[bytes]()
    address = server.invite(lambda request, wait: requests.append(request) or b"").address
    wrong = Link(Address(address.host, address.port, b"\0" * KEY_BYTES))
    assert refused(wrong)
    silent = raw(address)
    silent.sendall(bytes(32))
    assert ended(silent) and not requests


def test_a_key_lets_one_in(server: LinkServer) -> None:
    invitation = server.invite(echo)
    links = [Link(invitation.address) for _ in range(2)]  # whose proof the server reads first is the machine's affair
    assert sorted(refused(link) for link in links) == [False, True]


def test_who_is_no_longer_invited_stays_out(server: LinkServer) -> None:
    invitation = server.invite(echo)
    server.withdraw(invitation)
    link = Link(invitation.address)
    assert refused(link)
    assert not invitation.joined.done()


def test_whoever_says_nothing_is_let_go_and_keeps_nobody_out() -> None:
    server = LinkServer(HOST, handshake_s=0.2)
    silent = [raw(server.invite(echo).address) for _ in range(8)]
    link = Link(server.invite(echo).address)
    link.send(b"ab", soon())
    assert link.receive(soon()) == b"ba"
    assert all(ended(connection) for connection in silent)
    server.close()


def test_an_idle_connection_ends() -> None:
    server = LinkServer(HOST, idle_s=0.2)
    invitation = server.invite(echo)
    link = Link(invitation.address)
    invitation.ended.result(PATIENCE_S)
    assert refused(link)
    server.close()


def test_what_cannot_be_answered_so_is_an_empty_answer(server: LinkServer) -> None:
    link = Link(server.invite(lambda request, wait: bytes([1 // len(request)])).address)
    for request, answer in ((b"", b""), (b"x", b"\1")):
        link.send(request, soon())
        assert link.receive(soon()) == answer


def test_too_long_a_request_ends_its_connection(server: LinkServer) -> None:
    invitation = server.invite(echo)
    link = Link(invitation.address)
    link._socket.sendall(LENGTH.pack(MOST_BYTES + 1))
    invitation.ended.result(PATIENCE_S)
    with pytest.raises(ConnectionError):
        link.receive(soon())


def test_the_key_is_in_no_message() -> None:
    server = LinkServer(HOST)
    address = server.invite(echo).address
    server.close()
    assert address.key.hex() not in repr(address) and str(address.key) not in repr(address)


def test_an_answer_that_was_never_received_is_nobody_elses(server: LinkServer) -> None:
    link = Link(server.invite(echo).address)
    link.send(b"ab", soon())
    with pytest.raises(ConnectionError):
        link.send(b"cd", soon())


def test_who_freezes_is_waited_for_until_then(server: LinkServer) -> None:
    thawed = threading.Event()

    def answer(request: bytes, wait: Wait) -> bytes:
        thawed.wait(PATIENCE_S)
        return request

    link = Link(server.invite(answer).address)
    link.send(b"x", soon())
    with pytest.raises(TimeoutError):
        link.receive(time.monotonic() + 0.05)
    thawed.set()


def test_too_many_threads_end_no_server(server: LinkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(server.invite(echo).address)  # it listens
    monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("no more threads")))
    refused_one = socket.create_connection((HOST, server.invite(echo).address.port), PATIENCE_S)
    refused_one.settimeout(PATIENCE_S)
    assert ended(refused_one)
    monkeypatch.undo()
    for each in (link, Link(server.invite(echo).address)):
        each.send(b"ab", soon())
        assert each.receive(soon()) == b"ba"


async def waited_for(future: "Future[bytes]") -> None:
    """Return once somebody waits for it."""
    while not future._done_callbacks:  # type: ignore[attr-defined]  # a future tells nobody else
        await asyncio.sleep(0.01)


@given(requests=st.lists(st.binary(max_size=2**17), min_size=1, max_size=5))
def test_answers_come_in_turn_in_an_event_loop(requests: list[bytes]) -> None:
    server = LinkServer(HOST)
    link = Link(server.invite(echo).address)

    async def exchange() -> list[bytes]:
        return [await link.exchanged(request) for request in requests]

    assert asyncio.run(exchange()) == [request[::-1] for request in requests]
    link.close()
    server.close()


@pytest.mark.parametrize("num_before", [0, 2])
def test_who_hangs_up_is_computed_for_no_more(server: LinkServer, num_before: int) -> None:
    done, long = Future[bytes](), Future[bytes]()
    done.set_result(b"done")
    invitation = server.invite(lambda request, wait: wait(done if request == b"short" else long))
    link = Link(invitation.address)

    async def hang_up() -> None:
        for _ in range(num_before):
            assert await link.exchanged(b"short") == b"done"
        exchange = asyncio.ensure_future(link.exchanged(b"long"))
        await waited_for(long)
        exchange.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange

    asyncio.run(hang_up())
    invitation.ended.result(PATIENCE_S)
    assert long.cancelled()


def test_an_answer_that_comes_after_the_client_has_gone_hurts_nobody(
    server: LinkServer, caplog: pytest.LogCaptureFixture
) -> None:
    running = Future[bytes]()
    running.set_running_or_notify_cancel()  # so it can't be cancelled
    invitation = server.invite(lambda request, wait: wait(running))
    link = Link(invitation.address)
    link.send(b"x", soon())
    asyncio.run(waited_for(running))
    link.close()
    invitation.ended.result(PATIENCE_S)
    running.set_result(b"late")
    assert not caplog.records


@pytest.mark.parametrize("ends", ["the replica's side", "ours"])
def test_a_link_that_ends_ends_the_wait_for_its_answer(server: LinkServer, ends: str) -> None:
    never = Future[bytes]()
    link = Link(server.invite(lambda request, wait: wait(never)).address)

    async def exchange() -> None:
        answer = asyncio.ensure_future(link.exchanged(b"x"))
        await waited_for(never)
        if ends == "ours":
            link.hang_up()
        else:
            never.set_exception(ConnectionError("the process ends"))
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(answer, PATIENCE_S)

    asyncio.run(exchange())
