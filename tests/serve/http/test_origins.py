"""Pages of other origins, by CORS: none by default, and those that `--allow-origin` names. No Ray."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page
from pydantic import ValidationError
from starlette.responses import HTMLResponse

from ddm_ray.serve.cluster.args import ServeArgs, as_origin
from ddm_ray.serve.http.authentication.bearer import BearerTokens
from ddm_ray.serve.http.guard import Guard, Limits
from tests.serve.http.browser import serving
from tests.serve.http.test_browser_page import browser
from tests.serve.http.test_http_app import GENERATIONS, Served, error_of, served

__all__ = ["browser", "served"]

TOKEN, FRONT_END = "t" * 32, "http://localhost:3000"
PREFLIGHT = {
    "origin": FRONT_END,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture
def tokens(tmp_path: Path) -> BearerTokens | None:
    (tmp_path / "tokens").write_text(TOKEN)
    return BearerTokens.read(str(tmp_path / "tokens"))


def preflight(served: Served, guard: Guard, path: str = GENERATIONS, **headers: str) -> httpx.Response:
    return served.ask("OPTIONS", path, guard, headers=PREFLIGHT | headers)


def test_a_named_origin_may_ask(served: Served, tokens: BearerTokens | None) -> None:
    guard = Guard(served.app, tokens, Limits(origins=(FRONT_END,)))
    asked = preflight(served, guard)
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == FRONT_END
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"]
    headers = {"origin": FRONT_END, "authorization": f"Bearer {TOKEN}"}
    made = served.ask("POST", GENERATIONS, guard, json={"prompt": "7", "response_format": "png"}, headers=headers)
    assert made.status_code == 200 and made.headers["access-control-allow-origin"] == FRONT_END
    assert "X-Seed" in made.headers["access-control-expose-headers"]
    refused = served.ask("GET", "/v1/models", guard, headers={"origin": FRONT_END})  # a page reads why
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == FRONT_END


@pytest.mark.parametrize("origins", [(), ("http://localhost:3001", "https://localhost:3000")])
def test_another_origin_may_not(served: Served, tokens: BearerTokens | None, origins: tuple[str, ...]) -> None:
    for guard in (Guard(served.app, None, Limits(origins=origins)), Guard(served.app, tokens, Limits(origins=origins))):
        asked = preflight(served, guard)
        assert asked.status_code == 403 and "(allow_origin)" in error_of(asked)["message"]
        answer = served.ask("GET", "/healthz", guard, headers={"origin": FRONT_END})
        for each in (asked, answer):
            assert "access-control-allow-origin" not in each.headers and each.headers["vary"] == "Origin"


def test_a_preflight_says_nothing_of_the_model_and_starts_nothing(served: Served, tokens: BearerTokens | None) -> None:
    async def unreached(*_: Any) -> None:
        raise AssertionError("the routes were asked")

    guard = Guard(unreached, tokens, Limits(origins=(FRONT_END,)))
    known, unknown = (preflight(served, guard, path) for path in ("/v1/models/tiny", "/v1/models/another"))
    assert (known.text, dict(known.headers)) == (unknown.text, dict(unknown.headers)) and known.text == "OK"
    assert served.ask("OPTIONS", "/v1/models", guard).status_code == 401  # no preflight: it needs a token
    assert served.ask("OPTIONS", "/v1/models", guard, headers={"origin": FRONT_END}).status_code == 401
    assert error_of(preflight(served, guard, **{"access-control-request-method": "BREW"}))["type"]


def test_all_origins_may_be_allowed(served: Served, tokens: BearerTokens | None) -> None:
    guard = Guard(served.app, tokens, Limits(origins=("*",)))
    assert preflight(served, guard).headers["access-control-allow-origin"] == "*"
    assert (
        served.ask("GET", "/healthz", guard, headers={"origin": "null"}).headers["access-control-allow-origin"] == "*"
    )


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("http://LocalHost:3000/", "http://localhost:3000"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:80/", "http://app.example"),
        ("https://app.example:80", "https://app.example:80"),
        ("http://[::1]:5173", "http://[::1]:5173"),
        ("tauri://localhost", "tauri://localhost"),
        ("*", "*"),
    ],
)
def test_an_origin_is_compared_as_browsers_write_it(text: str, origin: str) -> None:
    assert as_origin(text) == origin
    assert ServeArgs.model_validate({"run": "/run", "allow_origin": [text]}).allow_origin == (origin,)


@pytest.mark.parametrize(
    "text", ["localhost:3000", "http://app.example/page", "http://*.example", "null", "", "http://"]
)
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="is no origin: give scheme, host and port"):
        ServeArgs(run="/run", allow_origin=(text,))


ASK = """async ([url, token]) => {
    const headers = {"Authorization": `Bearer ${token}`, "Content-Type": "application/json"};
    const body = JSON.stringify({prompt: "7", seed: 1, response_format: "png"});
    try {
        const answer = await fetch(url, {method: "POST", headers, body});
        return [answer.status, answer.headers.get("X-Seed")];
    } catch (error) { return String(error); }
}"""


@pytest.mark.contract
def test_a_browser_lets_a_page_of_a_named_origin_ask(
    browser: Browser, served: Served, tokens: BearerTokens | None
) -> None:
    with serving(HTMLResponse("<p>A front end")) as front_end, serving(Guard(served.app, tokens)) as api:
        context = browser.new_context()
        page = context.new_page()
        page.goto(front_end.url)

        def ask(page: Page, token: str) -> Any:
            return page.evaluate(ASK, [f"{api.url}{GENERATIONS[1:]}", token])

        assert "TypeError" in ask(page, TOKEN)
        api.app = Guard(served.app, tokens, Limits(origins=(as_origin(front_end.url),)))
        assert ask(page, TOKEN) == [200, "1"]
        assert ask(page, "another") == [401, None]
        context.close()
