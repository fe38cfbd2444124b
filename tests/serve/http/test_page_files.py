"""The files of the page: open to everybody, from this server alone, nothing inline. No browser, no Ray."""

import re

import pytest

from ddm_ray.serve.http.authentication.bearer import BearerTokens
from ddm_ray.serve.http.guard import Guard
from ddm_ray.serve.http.page_files import FILES
from tests.serve.http.test_http_app import Served, error_of, served

__all__ = ["served"]

MOST_LINES = 300
OWN = ("http://www.w3.org/2000/svg",)
"""Addresses that are names, which nobody asks."""


@pytest.mark.parametrize("path", FILES)
def test_a_file_is_open_and_says_what_it_may_load(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDM_SERVE_TOKENS", "t" * 32)
    guard = Guard(served.app, BearerTokens.read(None))
    answer = served.ask("GET", path, guard)
    assert (answer.status_code, answer.content) == (200, FILES[path].read_bytes())
    policy = dict(each.strip().split(" ", 1) for each in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy) and answer.headers["x-content-type-options"] == "nosniff"
    again = served.ask("GET", path, guard, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert served.ask("POST", path, Guard(served.app)).status_code == 405


def test_beside_them_nothing_is_open(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDM_SERVE_TOKENS", "t" * 32)
    guard = Guard(served.app, BearerTokens.read(None))
    for path in ("/page", "/page/", "/page/%2e%2e/guard.py", "/v1/models", "/openapi.json"):
        assert served.ask("GET", path, guard).status_code == 401, path
    assert error_of(served.ask("GET", "/page/guard.py"))["message"].endswith("the routes are listed at /openapi.json")
    assert not FILES.keys() & served.ask("GET", "/openapi.json").json()["paths"].keys()


def test_all_that_they_refer_to_is_among_them() -> None:
    used = set()
    for path, file in FILES.items():
        text = file.read_text()
        used |= {f"/{name}" for name in re.findall(r'(?:src|href)="(page/[^"]+)"', text)}
        used |= {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
        hosts = re.findall(r"\b(?:https?|wss?):[^\s\"'`<>]*|(?<=[\"'(])//[^\s\"']+", text)
        assert set(hosts) <= set(OWN), path
        assert len(text.splitlines()) < MOST_LINES, path
    assert used | {"/"} == FILES.keys()


def test_nothing_is_inline() -> None:
    """A browser would refuse it by the policy."""
    page = FILES["/"].read_text()
    assert "<style" not in page and not re.search(r"<[^>]+\s(style|on\w+)=", page)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page))
    for file in FILES.values():
        assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\(|document\.write", file.read_text()), file
