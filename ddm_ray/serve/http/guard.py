"""The guard before the routes: authentication, rates, sizes and times of requests, and an answer for every error.

Plain ASGI, so that a refusal costs next to nothing.
"""

import asyncio
import ipaddress
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from ddm_ray.serve.http import page_files
from ddm_ray.serve.http.authentication import Authenticator
from ddm_ray.serve.http.openai_errors import error_body, internal_error, retry_after
from ddm_ray.serve.http.origins import Origins

LOG = logging.getLogger("ray.serve")
OPEN = {"/healthz", "/readyz", *page_files.FILES}
"""Paths without authentication: those that probes ask, and the page, into which a token is typed."""

GATEWAY, OWN_FAULT = b"x-ddm-gateway", 599
"""Header that a gateway sets: it sends a request again after a 500, as after the death of a process. And the status of
a fault that the same request would meet again, so that the gateway doesn't."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """Bounds of every request. `per_minute`: requests for images of a client, or of all without authentication.

    `per_minute` None: any number. `local`: only requests to localhost or to an IP address are answered. `origins`:
    pages of these may ask from a browser, beside the server's own. `other_names` and `other_origins`: advice to those
    who want more of either.
    """

    body_bytes: int = 64 * 1024
    body_seconds: float = 10.0
    per_minute: float | None = None
    local: bool = False
    origins: tuple[str, ...] = ()
    other_names: str = "leave local out, or name a file of tokens (token_file)"
    other_origins: str = "allow its origin (allow_origin)"


class RefusedError(Exception):
    """A refusal before the routes: its status, its further headers, and OpenAI's error."""

    def __init__(self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers or {}


class Guard:
    """The application, for clients that may ask."""

    def __init__(
        self,
        app: App,
        authenticator: Authenticator | None = None,
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.monotonic,
        on_answer: Callable[[str, int], None] = lambda path, status: None,
    ):
        """`authenticator`: None lets in everybody. `on_answer` is called with each answer's path and status."""
        self._app, self._authenticator, self._limits, self._clock = app, authenticator, limits, clock
        self._on_answer = on_answer
        self._buckets: dict[bytes, tuple[float, float]] = {}
        # Outermost: a preflight has no token, and a page has to read a refusal, too.
        self._with_origins = Origins(self._guarded, limits.origins, limits.other_origins)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request; HEAD as GET, without the body."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        is_head, behind_gateway = scope["method"] == "HEAD", GATEWAY in dict(scope["headers"])

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._on_answer(scope["path"], message["status"])
                if message["status"] == 500 and behind_gateway:
                    message = {**message, "status": OWN_FAULT}
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        await self._with_origins({**scope, "method": "GET"} if is_head else scope, receive, noted)
        return None

    async def _guarded(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request if it may be; an error that the application doesn't catch is a 500 in OpenAI's form."""
        has_begun = False

        async def begun(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            self._admit(scope)
            body = await self._body(scope, receive)
            await self._app(scope, _replayed(body, receive), begun)
        except RefusedError as error:
            await _answer(send, error.status, error_body(str(error), None, error.code), error.headers)
        except Exception as error:
            LOG.exception("%s %s", scope["method"], scope["path"])
            if not has_begun:
                await _answer(send, 500, internal_error(error))

    def _admit(self, scope: Message) -> None:
        headers = dict(scope["headers"])
        # A foreign page can point a host name of its own at this server, and then ask as if it came from here.
        host, is_open = headers.get(b"host", b"").decode("latin-1"), self._authenticator is None
        if self._limits.local and is_open and not is_own_name(host):
            message = f"ask by localhost or by an IP address; to answer by other names, {self._limits.other_names}"
            raise RefusedError(421, message, "unknown_host")
        if scope["path"] in OPEN:
            return
        caller = b""
        if self._authenticator is not None:
            known = self._authenticator.caller(headers)
            if known is None:
                message = f"send one of this server's tokens: {self._authenticator.header}"
                raise RefusedError(401, message, "invalid_api_key", {"www-authenticate": self._authenticator.challenge})
            caller = known
        if scope["method"] == "POST" and self._limits.per_minute is not None:
            self._require_rate(caller, self._limits.per_minute)

    def _require_rate(self, caller: bytes, per_minute: float) -> None:
        """Take one request from the client's bucket, which holds `per_minute` requests and gains as many a minute."""
        now, most = self._clock(), max(1.0, per_minute)
        left, since = self._buckets.get(caller, (most, now))
        left = min(most, left + (now - since) * per_minute / 60)
        self._buckets[caller] = (left - 1 if left >= 1 else left, now)
        if left < 1:
            message = f"{per_minute:g} requests a minute are allowed"
            soon = retry_after((1 - left) * 60 / per_minute)
            raise RefusedError(429, message, "rate_limit_exceeded", {"retry-after": soon})

    async def _body(self, scope: Message, receive: Receive) -> bytes:
        """The request's body. Raises RefusedError if it is too large or too slow."""
        most = self._limits.body_bytes
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > most:
            raise RefusedError(413, f"the body has {length[:20].decode()} bytes, {most} are allowed", "too_large")
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RefusedError(400, "the client has gone", "disconnected")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise RefusedError(413, f"the body has more than the {most} bytes allowed", "too_large")
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            text = f"the body wasn't here within {self._limits.body_seconds:g} s"
            raise RefusedError(408, text, "request_timeout") from None


def is_own_name(host: str) -> bool:
    """True for a Host header without a name of a machine: localhost, an IP address, or nothing."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]*))(?::\d+)?", host, re.ASCII)
    if match is None:
        return False
    try:
        ipaddress.ip_address(match[1] or match[2])
    except ValueError:
        return (match[2] or "").lower() == "localhost" or not host
    return True


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body, which has been read already, once more."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(send: Send, status: int, body: dict[str, Any], others: Mapping[str, str] | None = None) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in (others or {}).items()]
    if status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
