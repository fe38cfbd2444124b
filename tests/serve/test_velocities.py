"""Velocities by gRPC: who is let in, what crosses, and how a call ends. Without Ray."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddm_ray.serve.velocities import METHOD, TOKEN, Address, Answer, NoAnswerError, VelocityLink, VelocityServer

HOST, PATIENCE_S = "127.0.0.1", 30.0


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[tuple[VelocityServer, Address]]:
    server = VelocityServer(HOST)
    await server.start()
    try:
        yield server, server.admit(answer)
    finally:
        await server.close()


async def echo(packed: bytes) -> bytes:
    return packed[::-1]


async def refused(address: Address, packed: bytes = b"x") -> str:
    """The status of a call that isn't answered."""
    link = VelocityLink(address)
    with pytest.raises(NoAnswerError) as error:
        await link.ask(packed, PATIENCE_S)
    await link.close()
    return str(error.value)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 2 * PATIENCE_S))


@settings(max_examples=20)
@given(calls=st.lists(st.binary(max_size=2**17), min_size=1, max_size=5))
def test_each_call_has_its_own_answer(calls: list[bytes]) -> None:
    """One after the other and all at once, also far larger than gRPC takes by itself."""

    async def work() -> None:
        async with served(echo) as (_, address):
            link = VelocityLink(address)
            for call in [*calls, bytes(2**23)]:
                assert await link.ask(call, PATIENCE_S) == call[::-1]
            answers = await asyncio.gather(*(link.ask(call, PATIENCE_S) for call in calls))
            assert answers == [call[::-1] for call in calls]
            await link.close()

    run(work)


def test_a_stranger_is_told_nothing_and_its_message_is_not_read() -> None:
    """Nor one with a token of another time, nor by another name of a method."""

    async def work() -> None:
        asked = list[bytes]()

        async def answer(packed: bytes) -> bytes:
            asked.append(packed)
            return b"a secret"

        async with served(answer) as (server, address):
            former = server.admit(answer)
            server.dismiss(former)
            assert await refused(replace(address, token="a" * 100_000)) == "RESOURCE_EXHAUSTED"
            for token in ("", "0" * 64, address.token[:-1], address.token + "0", former.token):
                assert await refused(replace(address, token=token), bytes(2**20)) == "UNIMPLEMENTED"
            channel = grpc.aio.insecure_channel(address.written)
            for method, metadata in ((METHOD, ()), ("/ddm/other", ((TOKEN, address.token),))):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await channel.unary_unary(method)(b"x", metadata=metadata, timeout=PATIENCE_S)
                assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED
            await channel.close()
            assert not asked
            link = VelocityLink(address)
            assert await link.ask(b"x", PATIENCE_S) == b"a secret"
            await link.close()

    run(work)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096])
def test_who_speaks_no_grpc_harms_nobody(sent: bytes) -> None:
    async def work() -> None:
        async with served(echo) as (_, address):
            strangers = [socket.create_connection((address.host, address.port)) for _ in range(8)]
            for stranger in strangers:
                stranger.sendall(sent)
            link = VelocityLink(address)
            assert await link.ask(b"ab", PATIENCE_S) == b"ba"
            await link.close()
            for stranger in strangers:
                stranger.close()

    run(work)


def test_a_token_is_in_no_message() -> None:
    address = Address(HOST, 1, "secret")
    assert "secret" not in repr(address) and "secret" not in str(address)
    assert Address("::1", 2, "").written == "[::1]:2"


def test_what_cant_be_answered_says_nothing_of_why() -> None:
    async def work() -> None:
        async def answer(packed: bytes) -> bytes:
            raise ValueError("a path of this machine")

        async with served(answer) as (_, address):
            assert await refused(address) == "ABORTED"
            channel = grpc.aio.insecure_channel(address.written)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await channel.unary_unary(METHOD)(b"x", metadata=((TOKEN, address.token),))
            assert "path" not in str(error.value)
            await channel.close()

    run(work)


@pytest.mark.parametrize("ends", ["it is cancelled", "its time is over", "its client goes"])
def test_a_call_that_nobody_waits_for_is_computed_no_more(ends: str) -> None:
    async def work() -> None:
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def answer(packed: bytes) -> bytes:
            began.set()
            try:
                await asyncio.sleep(2 * PATIENCE_S)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return b""

        async with served(answer) as (_, address):
            link = VelocityLink(address)
            asking = asyncio.ensure_future(link.ask(b"x", 1.0 if ends == "its time is over" else PATIENCE_S))
            await began.wait()
            if ends == "it is cancelled":
                asking.cancel()
            elif ends == "its client goes":
                await link.close()
            await cancelled.wait()
            with pytest.raises((NoAnswerError, asyncio.CancelledError)):
                await asking
            await link.close()

    run(work)


def test_a_server_that_goes_ends_the_wait_and_none_is_connected_to_where_none_is() -> None:
    async def work() -> None:
        began = asyncio.Event()

        async def answer(packed: bytes) -> bytes:
            began.set()
            await asyncio.sleep(2 * PATIENCE_S)
            return b""

        async with served(answer) as (server, address):
            link = VelocityLink(address)
            await link.connect(PATIENCE_S)
            asking = asyncio.ensure_future(link.ask(b"x", PATIENCE_S))
            await began.wait()
            await server.close()
            with pytest.raises(NoAnswerError):
                await asking
            with pytest.raises(TimeoutError):
                await VelocityLink(address).connect(0.1)

    run(work)


def test_a_link_that_is_closed_lets_what_is_in_flight_end() -> None:
    async def work() -> None:
        began, go_on = asyncio.Event(), asyncio.Event()

        async def answer(packed: bytes) -> bytes:
            began.set()
            await go_on.wait()
            return packed

        async with served(answer) as (_, address):
            link = VelocityLink(address)
            asking = asyncio.ensure_future(link.ask(b"x", PATIENCE_S))
            await began.wait()
            closing = asyncio.ensure_future(link.close(PATIENCE_S))
            await asyncio.sleep(0)
            go_on.set()
            assert await asking == b"x"
            await closing

    run(work)


def test_it_is_known_for_how_long_a_token_has_not_been_used() -> None:
    async def work() -> None:
        now = 100.0
        server = VelocityServer(HOST, lambda: now)
        await server.start()
        address = server.admit(echo)
        link, now = VelocityLink(address), 150.0
        assert server.idle_s(address) == 50
        await link.ask(b"x", PATIENCE_S)
        assert server.idle_s(address) == 0
        now = 170.0
        await refused(replace(address, token="0" * 64))
        assert server.idle_s(address) == 20
        await link.close()
        await server.close()

    run(work)
