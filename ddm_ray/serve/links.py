"""Links: an expert's velocities over a connection of their own, without Serve in between. No Ray.

A strategy that mixes experts asks each of them at every velocity, and a call through Serve takes longer than most
networks do. On the wire: the server's nonce, a proof that the client knows the key of its invitation, then requests
and answers in turn, each after its length. An empty answer says: ask through Serve, whose error tells what is wrong.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

KEY_BYTES = 32
LENGTH = struct.Struct("!I")
MOST_BYTES = 2**28
"""Bytes of a request or answer at most."""
HANDSHAKE_S, ANSWER_S, IDLE_S = 5.0, 10.0, 15.0
"""Seconds for a proof, for an answer, and between two requests, after which a connection ends.

Idle for longer than an answer may last, so that one slow expert doesn't cost the others' connections.
"""
PAUSE_S = 0.1
MOST_CONNECTIONS = 64


@dataclass(frozen=True)
class Address:
    """Address of a server, and the key for one connection to it."""

    host: str
    port: int
    key: bytes = field(repr=False)


@dataclass(frozen=True, eq=False)
class Invitation:
    """One connection that may come: what answers its requests, and when it came (`joined`) and went (`ended`)."""

    address: Address
    answer: Callable[[bytes], bytes]
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

    def invite(self, answer: Callable[[bytes], bytes]) -> Invitation:
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
                while True:
                    request = _received(connection)
                    try:
                        answer = invitation.answer(request)
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

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(LENGTH.pack(len(data)) + data)


def _received(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    if length > MOST_BYTES:
        raise ConnectionError(f"{length} bytes at once")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        num_bytes = connection.recv_into(view[done:])
        if not num_bytes:
            raise ConnectionError("the other side has gone")
        done += num_bytes
    return bytes(data)
