"""What servers behind the gateway refuse in words of their own becomes OpenAI's error object."""

import json
import re

import pytest

from ddm_ray.serve.cluster import haproxy
from tests.conftest import ROOT
from tests.serve.cluster.test_gateway import HAPROXY, Proxy, ask, standing
from tests.serve.conftest import free_port


def test_the_page_of_the_api_lists_all_codes_of_the_gateway() -> None:
    page = (ROOT / "docs/reference/http.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \| (.*?) \|", page, re.MULTILINE)
    listed = {(int(status), code) for row in rows for status in row[0].split(",") for code in row[1].split("`")}
    tables = (haproxy._ERRORS, haproxy._BEHIND)
    own = {(status, code) for table in tables for status, (_, code) in table.items() if code}
    assert own - listed == set()


@pytest.mark.skipif(HAPROXY is None, reason="HAProxy isn't installed")
@pytest.mark.integration
@pytest.mark.parametrize("status", [400, 403, 404, 405, 408, 413, 429, 431, 500, 503])
@pytest.mark.parametrize("kind", ["text/plain", "text/html"])
def test_a_servers_own_words_become_openais_object(status: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Serve's proxy, as where it knows no application, and of the server that it runs in."""
    monkeypatch.setattr(haproxy, "RETRIES", 1)
    proxy = Proxy(free_port(), status, status)
    proxy.kind = kind
    with proxy, standing(proxy.server_port) as (_, port):
        same, body = ask(port, b"Path not found. Ping http://10.0.0.7/-/routes")
    error = json.loads(body)["error"]
    assert same == status and b"10.0.0.7" not in body
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
