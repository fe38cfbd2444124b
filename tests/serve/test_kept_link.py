"""A kept link: who it is asked of, when it is replaced, and how it ends. Without Ray, whose response is a generator."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from ddm_ray.serve import kept_link
from ddm_ray.serve.kept_link import KeptLink
from ddm_ray.serve.links import Address, Link, LinkServer

PATIENCE_S = 30.0


class Replica:
    """A replica that answers its number, and invites as an expert's does, until it dies."""

    def __init__(self, number: int) -> None:
        self.server = LinkServer("127.0.0.1", idle_s=600.0)
        self._number, self._dead = number, asyncio.Event()
        self.num_cancelled = 0

    async def link(self) -> AsyncIterator[Address]:
        yield self.server.invite(lambda request, wait: bytes([self._number])).address
        await self._dead.wait()
        raise ConnectionError("the replica died")

    def die(self) -> None:
        self._dead.set()


class Response:
    """What Serve's handle gives for a method that streams."""

    def __init__(self, stream: AsyncIterator[Address]):
        self._stream, self.is_cancelled = stream, False

    def __aiter__(self) -> "Response":
        return self

    async def __anext__(self) -> Address:
        return await anext(self._stream)

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RENEW_S", "RETRY_S", "MOST_RETRY_S"):
        monkeypatch.setattr(kept_link, name, 0.0)


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def linked(kept: KeptLink) -> Link:
    """The link, once there is one."""
    await until(kept.current)
    link = kept.current()
    assert link is not None
    return link


@pytest.mark.usefixtures("at_once")
def test_a_link_is_replaced_so_that_all_replicas_have_work() -> None:
    async def run() -> None:
        replicas = [Replica(number) for number in range(2)]
        asked = iter(range(10**6))
        kept = KeptLink("expert", lambda: Response(replicas[next(asked) % 2].link()))
        answered = set[bytes]()

        async def both() -> bool:
            answered.add(await (await linked(kept)).exchanged(b"x"))
            return len(answered) == 2

        deadline = time.monotonic() + PATIENCE_S
        while not await both():
            assert time.monotonic() < deadline
        for replica in replicas:
            replica.server.close()

    asyncio.run(run())


def test_without_a_link_it_is_asked_for_once_at_a_time() -> None:
    async def run() -> None:
        replica, num_asked = Replica(1), 0

        def invited() -> Response:
            nonlocal num_asked
            num_asked += 1
            return Response(replica.link())

        kept = KeptLink("expert", invited)
        assert [kept.current() for _ in range(5)] == [None] * 5
        link = await linked(kept)
        assert num_asked == 1 and kept.current() is link
        replica.server.close()

    asyncio.run(run())


def test_a_replica_that_dies_ends_its_link() -> None:
    """Also one whose machine is silent, which its connection wouldn't tell."""

    async def run() -> None:
        replica = Replica(1)
        kept = KeptLink("expert", lambda: Response(replica.link()))
        link = await linked(kept)
        assert await link.exchanged(b"x") == b"\1"
        replica.die()
        await until(lambda: not kept._watching)
        with pytest.raises(ConnectionError):
            await link.exchanged(b"x")
        replica.server.close()

    asyncio.run(run())


@pytest.mark.usefixtures("at_once")
def test_a_link_that_cant_be_had_is_told_once_and_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        replica, responses = Replica(1), list[Response]()
        address = replica.server.invite(lambda request, wait: b"").address

        async def nowhere() -> AsyncIterator[Address]:
            yield Address(address.host, 1, address.key)  # where nobody listens

        def invited() -> Response:
            responses.append(Response(nowhere() if len(responses) < 2 else replica.link()))
            return responses[-1]

        kept = KeptLink("expert", invited)
        link = await linked(kept)
        assert await link.exchanged(b"x") == b"\1"
        assert [response.is_cancelled for response in responses[:3]] == [True, True, False]
        replica.server.close()

    asyncio.run(run())
    assert "no link to expert, so calls cross by Serve" in caplog.text


def test_nothing_crosses_beside_a_ray_that_encrypts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")

    async def run() -> None:
        kept = KeptLink("expert", lambda: pytest.fail("asked for a link"))
        assert kept.current() is None
        await asyncio.sleep(0)
        assert kept._linking is None

    asyncio.run(run())
