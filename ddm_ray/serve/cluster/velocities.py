"""Links: velocities of experts beside Serve, over ZeroMQ, which frames messages and, by CURVE, encrypts them. No Ray.

A call through Serve takes longer than most networks. A client sends its public key through Serve, which Ray protects,
and only connections with that key are accepted. After an empty answer the client asks through Serve, which has the
error.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from socket import socketpair
from threading import Thread
from typing import Any

import numpy as np
import zmq
from torch import Tensor
from zmq.auth import Authenticator

from ddm_ray.sampling.serialization import pack_velocity, unpack_velocity
from ddm_ray.serve.engine.versions import LOG
from ddm_ray.spelling import one_line

DOMAIN = "velocities"
MAX_BYTES = 2**28
"""Bytes of a request or answer at most."""
CONNECT_MS, HEARTBEAT_MS, SILENT_MS, LOOK_MS = 5000, 1000, 3000, 100
"""To connect, between two heartbeats, without one until a connection ends, between two looks whether it ended."""
IDLE_S = 15.0
"""Seconds without a request after which a client's key isn't accepted any more."""
RENEW_S, RETRY_S, MAX_RETRY_S = 10.0, 1.0, 60.0
"""Seconds between two tries for a new link: with a link, without one, and at most after failures."""

Endpoint = tuple[str, bytes]
"""A server's address in ZeroMQ's form, and its public key."""
AnswerRequest = Callable[[bytes], "Future[Tensor]"]


@dataclass(frozen=True)
class _Link:
    socket: Any
    """The connection, for one thread at a time."""
    response: Any
    """Serve's response; the server lets the connection in until this is cancelled."""


def _guarded(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, secret_key: bytes) -> Any:
    """A socket with this key and the limits above."""
    socket = context.socket(kind)
    socket.curve_secretkey, socket.maxmsgsize, socket.linger = secret_key, MAX_BYTES, 0
    socket.handshake_ivl, socket.heartbeat_ivl, socket.heartbeat_timeout = CONNECT_MS, HEARTBEAT_MS, SILENT_MS
    return socket


class VelocityServer:
    """Answers accepted clients, in one thread."""

    def __init__(self, host: str):
        """Listen at a port of this host. Raises zmq.ZMQError."""
        self._answers = dict[bytes, AnswerRequest]()
        self._done = SimpleQueue[tuple[zmq.Frame, Future[Tensor]] | None]()
        self._woken, self._wake = socketpair()
        self._wake.setblocking(False)
        self._context, (public_key, secret_key) = zmq.Context(), zmq.curve_keypair()
        self._authenticator = Authenticator(self._context)
        self._authenticator.configure_curve_callback(DOMAIN, self)
        self._authenticator.start()
        self._socket = _guarded(self._context, zmq.ROUTER, secret_key)
        self._socket.curve_server, self._socket.zap_domain = True, DOMAIN.encode()
        self._socket.zap_enforce_domain = True  # else every client is accepted if no authenticator runs
        self._socket.bind(f"tcp://{host}:*")
        self.endpoint: Endpoint = self._socket.last_endpoint.decode(), public_key
        Thread(target=self._serve, name="velocities", daemon=True).start()

    async def admit(self, client_key: bytes, answer: AnswerRequest) -> AsyncGenerator[Endpoint, None]:
        """Accept the client with this public key until it is idle for IDLE_S; `answer` answers its requests.

        Yields the endpoint to connect to.
        """
        asked_at = time.monotonic()

        def noted(request: bytes) -> "Future[Tensor]":
            nonlocal asked_at
            asked_at = time.monotonic()
            return answer(request)

        self._answers[client_key] = noted
        try:
            yield self.endpoint
            while (left_s := asked_at + IDLE_S - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
        finally:
            del self._answers[client_key]

    def callback(self, domain: str, client_key: bytes) -> bool:
        """True if a client with this public key is accepted; the authenticator calls it."""
        return client_key in self._answers

    def close(self) -> None:
        """Stop answering, and end all connections."""
        self._tell(None)

    def _serve(self) -> None:
        poller, zap = zmq.Poller(), self._authenticator.zap_socket
        for source in (self._socket, zap, self._woken):
            poller.register(source, zmq.POLLIN)
        while True:
            for source, _ in poller.poll():
                if source is self._socket:
                    peer, *_, request = self._socket.recv_multipart(copy=False)
                    self._begin(peer, request)
                elif source is zap:
                    asyncio.run(self._authenticator.handle_zap_message(zap.recv_multipart()))
                else:
                    self._woken.recv(2**12)
            while not self._done.empty():
                done = self._done.get()
                if done is None:
                    return self._context.destroy()
                peer, future = done
                try:
                    packed = pack_velocity(future.result())
                except Exception:  # the same call through Serve raises it
                    packed = b""
                self._socket.send_multipart([peer, packed])

    def _begin(self, peer: zmq.Frame, request: zmq.Frame) -> None:
        try:
            future = self._answers[str(request["User-Id"]).encode()](request.bytes)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda future: self._tell((peer, future)))

    def _tell(self, done: "tuple[zmq.Frame, Future[Tensor]] | None") -> None:
        self._done.put(done)
        with suppress(BlockingIOError):  # a full socket wakes the thread as well
            self._wake.send(b".")


def _connected(endpoint: Endpoint, public_key: bytes, secret_key: bytes) -> Any:
    """A connection. Raises TimeoutError if there is none within CONNECT_MS."""
    socket = _guarded(zmq.Context.instance(), zmq.DEALER, secret_key)
    address, socket.curve_serverkey = endpoint
    # So the socket can be written to only while connected: not before, and never again afterwards.
    socket.curve_publickey, socket.immediate, socket.reconnect_ivl = public_key, True, -1
    socket.connect(address)
    if not socket.poll(CONNECT_MS, zmq.POLLOUT):
        socket.close()
        raise TimeoutError(f"no connection to {address}")
    return socket


class VelocityClient:
    """A link to the replica that Serve chose last, renewed every RENEW_S so that all replicas get work."""

    def __init__(self, name: str, invited: Callable[[bytes], Any]):
        """`invited`: sends a public key through Serve and returns the response, which streams the endpoint.

        The key is accepted as long as that response lasts. Make a client in the event loop of Serve's handles.
        """
        self._name, self._invited, self._loop = name, invited, asyncio.get_running_loop()
        self._link: _Link | None = None
        self._newer: _Link | None = None
        self._linking: Future[None] | None = None
        self._linked_at, self._retry_s, self._is_waiting = -np.inf, RETRY_S, False

    def ask(self, request: bytes) -> bool:
        """Send a request; False if there is no link now. For one thread, as `answer`."""
        if self._newer is not None or self._is_waiting:  # else a late answer would count as this request's
            self._drop()
            self._link, self._newer = self._newer, None
        pause_s = self._retry_s if self._link is None else RENEW_S
        if time.monotonic() - self._linked_at > pause_s and (self._linking is None or self._linking.done()):
            self._linking = asyncio.run_coroutine_threadsafe(self._connect(), self._loop)
        try:
            if self._link is not None:
                self._link.socket.send(request, zmq.NOBLOCK)
                self._is_waiting = True
        except zmq.Again:  # it has ended
            self._drop()
        return self._is_waiting

    def answer(self, until: float) -> Tensor | None:
        """The velocity of the last request; None if none comes before `until`, a time of the monotonic clock."""
        assert self._link is not None
        socket = self._link.socket
        while not socket.poll(max(0, min(LOOK_MS, int(1000 * (until - time.monotonic()))))):
            if time.monotonic() > until or not socket.get(zmq.EVENTS) & zmq.POLLOUT:
                self._drop()
                return None
        self._is_waiting, packed = False, socket.recv()
        return unpack_velocity(packed) if packed else None

    def _drop(self) -> None:
        if self._link is not None:
            self._link.socket.close()
            self._loop.call_soon_threadsafe(self._link.response.cancel)
        self._link, self._is_waiting = None, False

    async def _connect(self) -> None:
        keys = zmq.curve_keypair()
        response = self._invited(keys[0])
        try:
            socket = await asyncio.to_thread(_connected, await anext(response), *keys)
            self._newer = _Link(socket, response)
            self._retry_s = RETRY_S
        except Exception as error:  # calls through Serve go on, and raise the reason
            # As a warning once: a port that can't be reached stays so.
            level = logging.WARNING if isinstance(error, OSError) and self._retry_s == RETRY_S else logging.INFO
            LOG.log(level, "no link to %s, so calls cross by Serve: %s", self._name, one_line(error, 200))
            response.cancel()
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        self._linked_at = time.monotonic()
