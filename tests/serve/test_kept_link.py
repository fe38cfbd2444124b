"""A kept link: who it is asked of, when it is replaced, and how it ends. Without Ray, whose response is a generator."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from ddm_ray.serve import kept_link
from ddm_ray.serve.kept_link import KeptLink
from ddm_ray.serve.velocities import Address, NoAnswerError, VelocityServer

PATIENCE_S = 30.0


class Replica:
    """A replica that answers its number, and invites as an expert's does, until it dies."""

    def __init__(self, number: int) -> None:
        self._number, self._server, self._dead = number, VelocityServer("127.0.0.1"), asyncio.Event()
        self.num_admitted = 0

    async def start(self) -> "Replica":
        await self._server.start()
        return self

    async def link(self) -> AsyncIterator[Address]:
        address = self._server.admit(self._answer)
        self.num_admitted += 1
        try:
            yield address
            await self._dead.wait()
            raise ConnectionError("the replica died")
        finally:
            self._server.dismiss(address)
            self.num_admitted -= 1

    async def _answer(self, packed: bytes) -> bytes:
        return bytes([self._number])

    def die(self) -> None:
        """As a machine that is silent: Ray learns of it, and a connection doesn't."""
        self._dead.set()

    async def close(self) -> None:
        await self._server.close()


class Response:
    """What Serve's handle gives for a method that streams: cancelled, the method is, too."""

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


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def answer(kept: KeptLink) -> bytes:
    """The answer over a link, once there is one."""
    while True:
        try:
            return await kept.ask(b"x")
        except NoAnswerError:
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("at_once")
def test_a_link_is_replaced_so_that_all_replicas_have_work() -> None:
    """While it is replaced every call is answered, and of the former links none stays."""

    async def work() -> None:
        replicas = [await Replica(number).start() for number in range(2)]
        responses = list[Response]()

        def invited() -> Response:
            responses.append(Response(replicas[len(responses) % 2].link()))
            return responses[-1]

        kept = KeptLink("expert", invited)
        answered = [await answer(kept)]
        while len(set(answered)) < 2 or len(responses) < 6:
            answered += await asyncio.gather(*(kept.ask(b"x") for _ in range(4)))
        await until(lambda: sum(not response.is_cancelled for response in responses) == 1)
        await until(lambda: sum(replica.num_admitted for replica in replicas) == len(kept._lives) == 1)
        for replica in replicas:
            await replica.close()

    run(work)


def test_without_a_link_it_is_asked_for_once_at_a_time() -> None:
    async def work() -> None:
        replica, num_asked = await Replica(1).start(), 0

        def invited() -> Response:
            nonlocal num_asked
            num_asked += 1
            return Response(replica.link())

        kept = KeptLink("expert", invited)
        for _ in range(5):
            with pytest.raises(NoAnswerError):
                await kept.ask(b"x")
        assert [await answer(kept) for _ in range(3)] == [b"\1"] * 3
        assert num_asked == 1
        await replica.close()

    run(work)


@pytest.mark.parametrize("how", ["its machine is silent", "its port is closed"])
def test_a_replica_that_goes_ends_its_link_and_another_is_asked_for(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        replicas = [await Replica(number).start() for number in (1, 2)]
        alive = list(replicas)
        kept = KeptLink("expert", lambda: Response(alive[0].link()))
        assert await answer(kept) == b"\1"
        alive.pop(0)
        monkeypatch.setattr(kept_link, "RETRY_S", 0.0)
        kept._retry_s = 0.0
        if how == "its machine is silent":
            replicas[0].die()
        else:
            await replicas[0].close()
        assert await answer_of(kept, b"\2")
        await until(lambda: len(kept._lives) == 1)
        for replica in replicas:
            await replica.close()

    async def answer_of(kept: KeptLink, right: bytes) -> bool:
        while await answer(kept) != right:
            await asyncio.sleep(0.005)
        return True

    run(work)


@pytest.mark.usefixtures("at_once")
def test_a_link_that_cant_be_had_is_told_once_and_asked_for_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_link, "CONNECT_S", 0.1)
    monkeypatch.setattr(kept_link, "RENEW_S", 1000.0)

    async def work() -> None:
        replica, responses = await Replica(1).start(), list[Response]()

        async def nowhere() -> AsyncIterator[Address]:
            yield Address("127.0.0.1", 1, "none")  # where nothing listens

        async def not_yet() -> AsyncIterator[Address]:
            return
            yield  # its weights aren't at hand

        def invited() -> Response:
            streams = [nowhere, not_yet, nowhere]
            responses.append(Response((streams[len(responses)] if len(responses) < 3 else replica.link)()))
            return responses[-1]

        kept = KeptLink("expert", invited)
        assert await answer(kept) == b"\1"
        assert [response.is_cancelled for response in responses[:4]] == [True] * 3 + [False]
        await replica.close()

    run(work)
    assert "no link to expert, so calls cross by Serve" in caplog.text


def test_nothing_crosses_beside_a_ray_that_encrypts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")

    async def work() -> None:
        kept = KeptLink("expert", lambda: pytest.fail("asked for a link"))
        with pytest.raises(NoAnswerError):
            await kept.ask(b"x")
        await asyncio.sleep(0)
        assert kept._connecting is None

    run(work)
