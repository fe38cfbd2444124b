"""Velocities by gRPC, straight from an expert's replica: strategies that mix experts ask for one at every step.

A call through Serve takes 18 ms of processors a step. Whoever asks sends a token that only Serve gave out; a stranger's
message isn't read. Calls aren't encrypted, as Ray's own aren't unless it uses TLS.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

METHOD, TOKEN = "/ddm/velocity", "ddm-token"
MOST_BYTES = 2**28
"""Bytes of a call or an answer at most."""
OPTIONS = [
    ("grpc.max_receive_message_length", MOST_BYTES),
    ("grpc.max_send_message_length", MOST_BYTES),
    ("grpc.enable_http_proxy", 0),  # no proxy of the environment's stands between two replicas
    ("grpc.so_reuseport", 0),  # a port is one replica's
    ("grpc.use_local_subchannel_pool", 1),
    # A machine that is silent is taken for gone after these.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]

Answer = Callable[[bytes], Awaitable[bytes]]
"""The answer to a packed call."""


class NoAnswerError(Exception):
    """A call that isn't answered here, for whichever reason: the same call through Serve tells it."""


@dataclass(frozen=True)
class Address:
    """Address of a server, and what it lets in."""

    host: str
    port: int
    token: str = field(repr=False)

    @property
    def written(self) -> str:
        """HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class VelocityServer(grpc.GenericRpcHandler):  # type: ignore[misc]  # gRPC has no types
    """Answers calls that have a token of its own. Make and use it in one event loop."""

    def __init__(self, host: str, clock: Callable[[], float] = time.monotonic):
        self._host, self._clock = host, clock
        self._answers, self._used_at = dict[str, Answer](), dict[str, float]()
        self._server = grpc.aio.server(options=OPTIONS)
        self._server.add_generic_rpc_handlers([self])
        self._port = 0

    async def start(self) -> None:
        """Listen at a free port of the host. Raises RuntimeError where that can't be."""
        self._port = self._server.add_insecure_port(Address(self._host, 0, "").written)
        await self._server.start()

    def admit(self, answer: Answer) -> Address:
        """Let in calls with a token, which `answer` answers from now on."""
        address = Address(self._host, self._port, secrets.token_hex(32))
        self._answers[address.token], self._used_at[address.token] = answer, self._clock()
        return address

    def idle_s(self, address: Address) -> float:
        """Seconds since its token was let in last, or given out."""
        return self._clock() - self._used_at[address.token]

    def dismiss(self, address: Address) -> None:
        """Let its token in no more."""
        del self._answers[address.token], self._used_at[address.token]

    async def close(self) -> None:
        """Listen no more; what is in flight is lost."""
        await self._server.stop(None)

    def service(self, details: Any) -> Any:
        """Return what answers a call, before gRPC reads the call's message; None: nothing does."""
        given = str(dict(details.invocation_metadata).get(TOKEN, "")).encode()
        for token, answer in self._answers.items():
            if hmac.compare_digest(token.encode(), given) and details.method == METHOD:
                self._used_at[token] = self._clock()
                return grpc.unary_unary_rpc_method_handler(partial(_answered, answer))
        return None


async def _answered(answer: Answer, packed: bytes, context: Any) -> bytes:
    try:
        return await answer(packed)
    except Exception:  # of which Serve tells the same caller
        return await context.abort(grpc.StatusCode.ABORTED, "ask through Serve")  # type: ignore[no-any-return]


class VelocityLink:
    """A connection to a server that admitted us. Of one event loop."""

    def __init__(self, address: Address):
        self._channel = grpc.aio.insecure_channel(address.written, OPTIONS)
        self._call, self._metadata = self._channel.unary_unary(METHOD), ((TOKEN, address.token),)

    async def connect(self, seconds: float) -> None:
        """Return once it is connected. Raises TimeoutError after so many seconds."""
        async with asyncio.timeout(seconds):
            await self._channel.channel_ready()

    async def ask(self, packed: bytes, seconds: float) -> bytes:
        """The answer to a packed call. NoAnswerError where none comes in so many seconds. Cancelled, none is made."""
        try:
            return bytes(await self._call(packed, timeout=seconds, metadata=self._metadata))
        except grpc.RpcError as error:
            raise NoAnswerError(error.code().name) from None

    async def close(self, seconds: float | None = None) -> None:
        """End the connection; what is in flight has so many seconds, or none."""
        await self._channel.close(seconds)
