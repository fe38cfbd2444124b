"""Links: calls of an expert over a connection of their own, without Serve in between. No Ray.

A call through Serve takes longer than most networks do. On the wire: the server's nonce, a proof that the client knows
the key of its invitation, then requests and answers in turn, each after its length. An empty answer says: ask through
Serve, whose error tells what is wrong. A client that hangs up wants its answer no more.
"""

import asyncio
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

KEY_BYTES = 32
LENGTH = struct.Struct("!I")
MOST_BYTES = 2**28
"""Bytes of a request or answer at most."""
HANDSHAKE_S, ANSWER_S, IDLE_S = 5.0, 10.0, 15.0
"""Seconds for a proof, for an answer, and between two requests, after which a connection ends.

Idle for longer than an answer may last, so that one slow expert doesn't cost the others' connections.
"""
PAUSE_S = 0.1
GONE = "the other side has gone"
MOST_CONNECTIONS = 64


@dataclass(frozen=True)
class Address:
    """Address of a server, and the key for one connection to it."""

    host: str
    port: int
    key: bytes = field(repr=False)


Wait = Callable[["Future[Any]"], Any]
"""The result of a future, as soon as there is one; if the client hangs up before, the future is cancelled."""
Answer = Callable[[bytes, Wait], bytes]
"""The answer to a request, which waits for nothing but by what it is given."""


@dataclass(frozen=True, eq=False)
class Invitation:
    """One connection that may come: what answers its requests, and when it came (`joined`) and went (`ended`)."""

    address: Address
    answer: Answer
    joined: "Future[None]" = field(default_factory=Future)
    ended: "Future[None]" = field(default_factory=Future)


class LinkServer:
    """Answers those who were invited, each in a thread of its own."""

    def __init__(self, host: str, handshake_s: float = HANDSHAKE_S, idle_s: float = IDLE_S):
        """Listens at a port of this host. Raises OSError."""
        self._handshake_s, self._idle_s = handshake_s, idle_s
        self._listener = socket.create_server((host, 0))
        self._host, self._port = host, int(self._listener.getsockname()[1])
        self._invitations: dict[bytes, Invitation] = {}
        self._free, self._closed = threading.Semaphore(MOST_CONNECTIONS), False
        threading.Thread(target=self._accept, name="links", daemon=True).start()

    def invite(self, answer: Answer) -> Invitation:
        """Let one connection in, whose requests `answer` answers."""
        key = secrets.token_bytes(KEY_BYTES)
        invitation = Invitation(Address(self._host, self._port, key), answer)
        self._invitations[key] = invitation
        return invitation

    def withdraw(self, invitation: Invitation) -> None:
        """Let it in no more, if it hasn't come."""
        self._invitations.pop(invitation.address.key, None)

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or this process has too much open for now
                time.sleep(PAUSE_S)
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=[connection], name="link", daemon=True).start()
            except RuntimeError:  # too many threads for now
                self._free.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        invitation = None
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(self._handshake_s)
                nonce = secrets.token_bytes(KEY_BYTES)
                connection.sendall(nonce)
                invitation = self._proven(nonce, _exactly(connection, hashlib.sha256().digest_size))
                if invitation is None:
                    return
                invitation.joined.set_result(None)
                connection.settimeout(self._idle_s)
                with _Client(connection) as client:
                    while True:
                        request = _received(connection)
                        try:
                            answer = invitation.answer(request, client.wait)
                        except ConnectionError:
                            raise
                        except Exception:  # whatever it is, the same call through Serve tells of it
                            answer = b""
                        _send(connection, answer)
        except OSError:
            pass  # gone, idle or a stranger
        finally:
            self._free.release()
            if invitation is not None:
                invitation.ended.set_result(None)

    def _proven(self, nonce: bytes, proof: bytes) -> Invitation | None:
        for key in list(self._invitations):
            if hmac.compare_digest(hmac.digest(key, nonce, "sha256"), proof):
                return self._invitations.pop(key, None)
        return None


class _Client(selectors.DefaultSelector):
    """The client at the other end of a connection: has it gone, or is what it asked for there?"""

    def __init__(self, connection: socket.socket):
        super().__init__()
        self._ready, self._tell = socket.socketpair()
        self._tell.setblocking(False)
        self.register(connection, selectors.EVENT_READ)
        self.register(self._ready, selectors.EVENT_READ)

    def wait(self, future: "Future[Any]") -> Any:
        """The result of a future. ConnectionError if the client has gone, or says something, before it is there."""
        future.add_done_callback(self._wake)
        while not future.done():
            if any(key.fileobj is not self._ready for key, _ in self.select()):
                future.cancel()
                raise ConnectionError("the client wants no answer any more")
        self._ready.recv(1)
        return future.result()

    def _wake(self, _: "Future[Any]") -> None:
        with suppress(OSError):  # closed, since the client had gone
            self._tell.send(b".")

    def close(self) -> None:
        """Wait for nothing any more."""
        super().close()
        self._ready.close()
        self._tell.close()


class Link:
    """A connection to a server that invited. Not for several threads."""

    def __init__(self, address: Address):
        """Raises OSError."""
        self._socket = socket.create_connection((address.host, address.port), HANDSHAKE_S)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = _exactly(self._socket, KEY_BYTES)
            self._socket.sendall(hmac.digest(address.key, nonce, "sha256"))
        except OSError:
            self.close()
            raise
        self._waiting = False

    def send(self, request: bytes, until: float) -> None:
        """Send a request, whose answer has to be received before the next, until then by the monotonic clock.

        Raises OSError, also if an answer is still to come: whoever took it for the next one's would be wrong.
        """
        if self._waiting:
            raise ConnectionError("the answer before this one was never received")
        self._waiting = True
        self._socket.settimeout(_left(until))
        _send(self._socket, request)

    def receive(self, until: float) -> bytes:
        """The answer to what was sent. Raises OSError."""
        self._socket.settimeout(_left(until))
        answer = _received(self._socket)
        self._waiting = False
        return answer

    async def exchanged(self, request: bytes) -> bytes:
        """The answer to a request, for an event loop. Raises OSError; then, or cancelled, the connection ends."""
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        try:
            await loop.sock_sendall(self._socket, LENGTH.pack(len(request)) + request)
            return await self._arriving(_length(await self._arriving(LENGTH.size)))
        except BaseException:
            self.close()
            raise

    async def _arriving(self, count: int) -> bytes:
        data, loop = bytearray(count), asyncio.get_running_loop()
        view, done = memoryview(data), 0
        while done < count:
            num_bytes = await loop.sock_recv_into(self._socket, view[done:])
            if not num_bytes:
                raise ConnectionError(GONE)
            done += num_bytes
        return bytes(data)

    def hang_up(self) -> None:
        """End the connection for whoever waits for an answer in another thread, who then closes it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(LENGTH.pack(len(data)) + data)


def _received(connection: socket.socket) -> bytes:
    return _exactly(connection, _length(_exactly(connection, LENGTH.size)))


def _length(packed: bytes) -> int:
    (length,) = LENGTH.unpack(packed)
    if length > MOST_BYTES:
        raise ConnectionError(f"{length} bytes at once")
    return int(length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        num_bytes = connection.recv_into(view[done:])
        if not num_bytes:
            raise ConnectionError(GONE)
        done += num_bytes
    return bytes(data)
