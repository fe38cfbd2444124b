"""A browser, and an application on a port of this machine that it can ask."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, expect, sync_playwright

from ddm_ray.serve.http.guard import App, Message, Receive, Send
from tests.conftest import wait_for

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A Chromium without a window; the test is skipped where there is none, or fails where DDM_BROWSER is set."""
    path = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if path is None:
        missing = f"none of {', '.join(BROWSERS)} is on PATH: on Debian, apt-get install chromium"
        if os.environ.get("DDM_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, chromium_sandbox=os.geteuid() != 0)
        try:
            yield browser
        finally:
            browser.close()


class Site:
    """A server of this process; `app` is what it answers with, which may change between requests."""

    def __init__(self, app: App):
        self.app, self.url = app, ""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    def generate(self, token: str = "", **body: Any) -> Any:
        """The API's own answer."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.post(f"{self.url}v1/images/generations", json=body, headers=headers, timeout=60).json()

    def get(self, path: str) -> Any:
        """The answer of a route."""
        return httpx.get(f"{self.url}{path}", timeout=60).json()


@contextmanager
def serving(app: App) -> Iterator[Site]:
    """A site on a port of its own, until the end."""
    site = Site(app)
    server = uvicorn.Server(uvicorn.Config(site, port=0, lifespan="off", log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started, 30, every=0.01)
        site.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
        yield site
    finally:
        server.should_exit = True
        thread.join(30)


@dataclass
class Tab:
    """A page that is watched: all that it asked for, and all that it complained of."""

    page: Page
    requests: list[Request] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request))
        self.page.on("response", self._look)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note)

    def _look(self, response: Response) -> None:
        if response.status >= 400 and "/v1/" not in response.url:
            self.missing.append(response.url)

    def _note(self, message: ConsoleMessage) -> None:
        # A browser tells of each answer that is a refusal; the page's affair is what it does then.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)

    @property
    def asked(self) -> list[Any]:
        """Bodies of its requests for images."""
        return [request.post_data_json for request in self.requests if request.method == "POST"]


@contextmanager
def tab(browser: Browser, url: str, **options: Any) -> Iterator[Tab]:
    """A tab of a fresh profile at this address, which must ask nobody else and complain of nothing."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    context.set_default_timeout(PATIENCE_MS)
    try:
        opened = Tab(context.new_page())
        opened.page.goto(url)
        yield opened
        hosts = {request.url for request in opened.requests if not request.url.startswith((url, "data:"))}
        assert not hosts and not opened.missing and not opened.complaints
    finally:
        context.close()
