"""The door before the routes: tokens, rates, sizes and times of bodies, errors that nobody caught. No Ray."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from ddm_ray.serve.http.authentication.bearer import TOKENS, BearerTokens
from ddm_ray.serve.http.guard import GATEWAY, OWN_FAULT, Guard, Limits
from tests.serve.http.test_http_app import GENERATIONS, Served, error_of, served

__all__ = ["served"]

TOKEN = "t" * 32


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(f"{TOKEN}\n{'u' * 32}\n")
    return str(path)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"Bearer {TOKEN}"}, 200),
        ({"authorization": f"bearer {'u' * 32}"}, 200),
        ({}, 401),
        ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"authorization": f"Bearer {TOKEN}x"}, 401),
        ({"authorization": "Bearer é".encode()}, 401),
    ],
)
def test_who_has_a_token_is_let_in(served: Served, token_file: str, headers: dict[str, Any], status: int) -> None:
    guard = Guard(served.app, BearerTokens.read(token_file))
    answer = served.ask("GET", "/v1/models", guard, headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert error_of(answer)["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
    for route in ("/healthz", "/readyz"):
        assert served.ask("GET", route, guard).status_code == 200
    assert served.ask("GET", "/metrics", guard).status_code == 401


def test_tokens_come_from_a_variable_too(monkeypatch: pytest.MonkeyPatch, token_file: str) -> None:
    monkeypatch.setenv(TOKENS, f" {TOKEN} {'u' * 32}\n")
    tokens = BearerTokens.read(None)
    assert tokens is not None and tokens == BearerTokens.read(token_file) and len(tokens.digests) == 2
    monkeypatch.delenv(TOKENS)
    assert BearerTokens.read(None) is None


def test_requests_a_minute_are_a_tokens_own(served: Served, token_file: str) -> None:
    now = 0.0
    guard = Guard(served.app, BearerTokens.read(token_file), Limits(per_minute=2), clock=lambda: now)

    def status(token: str) -> int:
        headers = {"authorization": f"Bearer {token}"}
        answer = served.ask("POST", GENERATIONS, guard, json={"prompt": "1", "steps": 1}, headers=headers)
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "30" and error_of(answer)["code"] == "rate_limit_exceeded"
        return answer.status_code

    assert [status(TOKEN) for _ in range(3)] == [200, 200, 429]
    assert status("u" * 32) == 200
    now = 30.0
    assert [status(TOKEN) for _ in range(2)] == [200, 429]


def test_a_rate_may_be_less_than_one_a_minute(served: Served) -> None:
    now = 0.0
    guard = Guard(served.app, limits=Limits(per_minute=0.5), clock=lambda: now)

    def status() -> int:
        return served.ask("POST", GENERATIONS, guard, json={"prompt": "1", "steps": 1}).status_code

    assert [status(), status()] == [200, 429]
    now = 120.0
    assert [status(), status()] == [200, 429]


def test_bodies_have_an_end(served: Served) -> None:
    guard = Guard(served.app, limits=Limits(body_bytes=1000))
    assert served.ask("POST", GENERATIONS, guard, json={"prompt": "1", "steps": 1}).status_code == 200
    answer = served.ask("POST", GENERATIONS, guard, json={"prompt": "1", "user": "x" * 1000})
    assert answer.status_code == 413 and error_of(answer)["code"] == "too_large"

    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    answer = served.ask("POST", GENERATIONS, guard, content=unannounced())
    assert answer.status_code == 413


def test_no_more_of_a_body_is_taken_in_than_is_allowed(served: Served) -> None:
    guard, taken = Guard(served.app), 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1000
            yield b" " * 1000

    assert served.ask("POST", GENERATIONS, guard, content=endless()).status_code == 413
    assert Limits().body_bytes < taken <= Limits().body_bytes + 2000
    taken = 0
    announced = {"content-length": "150000000"}
    assert served.ask("POST", GENERATIONS, guard, content=endless(), headers=announced).status_code == 413
    assert taken == 0


def test_who_has_no_token_is_refused_before_anything_is_read(served: Served, token_file: str) -> None:
    async def unreached(*_: Any) -> None:
        raise AssertionError("the routes were asked")

    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    guard = Guard(unreached, BearerTokens.read(token_file))
    assert served.ask("POST", GENERATIONS, guard, content=unread()).status_code == 401


def test_a_body_that_comes_byte_by_byte_is_waited_for_no_longer(served: Served) -> None:
    """However steadily they come."""
    guard, taken = Guard(served.app, limits=Limits(body_seconds=0.3)), 0

    async def drip() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b" "
            await asyncio.sleep(0.01)

    answer = served.ask("POST", GENERATIONS, guard, content=drip())
    assert answer.status_code == 408 and error_of(answer)["code"] == "request_timeout"
    assert 0 < taken < 1000


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("LocalHost:8000", "10.0.0.7", "[::1]:1")),
        *((host, 421) for host in ("evil.example:8000", "localhost.evil.example", "127.0.0.1.evil")),
        *((host, 421) for host in ("[::1].evil:8", "localhost@evil.example", "x" * 4000)),
    ],
)
def test_by_a_name_of_somebody_elses_nobody_asks(served: Served, host: str, status: int) -> None:
    """Whose browser was led to this machine by that name: nor for the page, which could then be read there."""
    local = Guard(served.app, limits=Limits(local=True))
    for route in ("/v1/models", "/", "/healthz"):
        answer = served.ask("GET", route, local, headers={"host": host.encode("latin-1")})
        assert answer.status_code == status
        if status == 421:
            assert error_of(answer)["code"] == "unknown_host" and "x" * 61 not in answer.text
            assert all(setting in error_of(answer)["message"] for setting in ("token_file", "local"))
    assert served.ask("GET", "/v1/models", Guard(served.app), headers={"host": "evil.example"}).status_code == 200


def test_head_is_answered_as_get(served: Served, token_file: str) -> None:
    """On every route, also where GET is refused, and behind tokens."""
    open_to_all, guarded = Guard(served.app), Guard(served.app, BearerTokens.read(token_file))
    paths = {route.path for route in served.app.routes if isinstance(route, Route)}  # FastAPI's own, too
    assert {"/", "/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/models", GENERATIONS} <= paths
    for path in (*paths, "/v1/models/tiny", "/v1/models/another", "/nowhere"):
        for guard in (open_to_all, guarded):
            get, head = (served.ask(method, path, guard) for method in ("GET", "HEAD"))
            assert (head.status_code, head.content) == (get.status_code, b"")
            same = [name for name in get.headers if path != "/metrics" or name != "content-length"]
            assert [head.headers[name] for name in same] == [get.headers[name] for name in same]
    assert served.ask("HEAD", "/v1/models", open_to_all).status_code == 200
    assert served.ask("HEAD", "/v1/models", guarded).status_code == 401


def test_an_error_that_nobody_caught_is_in_openais_form(served: Served) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("secret")

    answer = served.ask("GET", "/anything", Guard(broken))
    assert answer.status_code == 500 and "secret" not in answer.text
    # A gateway is told so that it doesn't ask again.
    gateways = served.ask("GET", "/anything", Guard(broken), headers={GATEWAY.decode(): "1"})
    assert gateways.status_code == OWN_FAULT and gateways.json() == answer.json()
    assert error_of(answer)["type"] == "server_error"
