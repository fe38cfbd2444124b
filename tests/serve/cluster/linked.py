"""Replicas with links, without Ray: what their tests share."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from ddm_ray.serve.cluster.velocities import Endpoint, VelocityClient, VelocityServer

HOST, PATIENCE_S = "127.0.0.1", 60.0


class Response:
    """What Serve's handle gives for a method that streams, which runs on and is cancelled as there."""

    def __init__(self, stream: AsyncIterator[Endpoint]):
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._run(stream))
        self.is_cancelled = False

    async def _run(self, stream: AsyncIterator[Endpoint]) -> None:
        async for endpoint in stream:
            self._first.set_result(endpoint)

    async def __anext__(self) -> Endpoint:
        return await self._first  # type: ignore[no-any-return]

    def cancel(self) -> None:
        self.is_cancelled = True
        self._task.cancel()


class Replica:
    """A replica that answers as it is told, and lets in as an expert's does."""

    def __init__(self, answer: Callable[[bytes], Future[Tensor]]):
        self.server, self._answer = VelocityServer(HOST), answer
        self.responses = list[Response]()

    def invited(self, client_key: bytes) -> Response:
        self.responses.append(Response(self.server.admit(client_key, self._answer)))
        return self.responses[-1]


def velocity(values: bytes) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32)


def ready(values: bytes) -> Future[Tensor]:
    future = Future[Tensor]()
    future.set_result(velocity(values))
    return future


def echo(request: bytes) -> Future[Tensor]:
    return ready(request[::-1])


def soon() -> float:
    """A time of the monotonic clock that is far off enough."""
    return time.monotonic() + PATIENCE_S


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 2 * PATIENCE_S))


async def until(condition: Callable[[], object]) -> None:
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def asked(client: VelocityClient, request: bytes) -> None:
    """Ask, as soon as there is a connection."""
    deadline = soon()
    while not await asyncio.to_thread(client.ask, request):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def exchanged(client: VelocityClient, request: bytes) -> bytes | None:
    """The answer over the first connection there is."""
    await asked(client, request)
    answer = await asyncio.to_thread(client.answer, soon())
    return None if answer is None else bytes(answer.byte().tolist())
