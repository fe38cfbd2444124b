"""Requests of any kind, generated: none is a fault of the server, and every refusal is OpenAI's error object. No Ray.

Without chaos a small draw of them.
"""

import asyncio
import gzip
import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddm_ray.core.solvers import SOLVERS
from ddm_ray.serve.http.generation import GenerationRequest
from ddm_ray.serve.http.guard import Guard
from tests.serve.http.test_http_app import GENERATIONS, Served, served

pytestmark = pytest.mark.contract

__all__ = ["served"]

FEW, MANY = 200, 10_000
KINDS_OF_REFUSAL = ("invalid_request_error", "server_error")
ROUTES = ("/", "/v1/models", "/v1/models/tiny", "/healthz", "/readyz", "/metrics", "/openapi.json", "/page/app.js")


@dataclass(frozen=True)
class Asked:
    """A request as it comes from a connection."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True)
class Answered:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


async def ask(app: Any, asked: Asked) -> Answered:
    """Send a request to an ASGI application, its body in two parts."""
    half = len(asked.body) // 2
    parts = [(asked.body[:half], True), (asked.body[half:], False)]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()
        body, more = parts.pop(0)
        return {"type": "http.request", "body": body, "more_body": more}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "server": ("served", 80),
        "client": ("client", 1),
        "root_path": "",
        "method": asked.method,
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "query_string": b"",
        "headers": list(asked.headers),
    }
    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return Answered(sent[0]["status"], dict(sent[0]["headers"]), body)


TEXTS = st.text(st.characters(), max_size=20) | st.sampled_from(["", "7", "\ud800", "\0", "x" * 10_000, "8x8", "auto"])
NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, -1, 10**400, 1e308, -1e308, 5e-324, 2**53, 2**63, 2**64, float("nan"), float("inf")])
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NUMERALS = st.text("0123456789", min_size=1, max_size=60) | st.sampled_from(
    ["1" * 5000, "0." + "0" * 50 + "1", "0.9", "1.0", "0", "-1", "1e400", "nan", "٣"]
)
STRATEGIES = st.one_of(
    st.sampled_from(["once", "full", "oracle", "top-1", "top-2", "sticky", "sample-1", "nucleus-0.9-0.5"]),
    st.builds(
        lambda kind, numerals: "-".join([kind, *numerals]),
        st.sampled_from(["once", "full", "top", "sample", "sticky", "threshold", "nucleus", "oracle"]),
        st.lists(NUMERALS, max_size=3),
    ),
)
TIMES = st.sampled_from(["uniform", "cosine", "shifted-", "shifted-1e-300", "shifted-1e300"]) | NUMERALS.map(
    lambda numeral: f"shifted-{numeral}"
)
# Each value by itself can be met; not all of them together.
SOUND: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.sampled_from(list("0123456789")),
    "n": st.integers(1, 3),
    "seed": st.integers(0, 1000),
    "strategy": STRATEGIES,
    "times": TIMES,
    "solver": st.sampled_from(sorted(SOLVERS)),
    "guidance_scale": st.floats(-100, 100),
    "guidance_interval": st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted),
    "guidance_kind": st.sampled_from(["mixture", "per-expert"]),
    "router_temperature": st.floats(1e-3, 1e3),
    "size": st.sampled_from(["8x8", "16x16", "auto", "512x512"]),
    "response_format": st.sampled_from(["b64_json", "png"]),
    "stream": st.booleans(),
    "partial_images": st.integers(0, 3),
    "routing": st.booleans(),
    "timeout": st.floats(0.01, 300, exclude_min=True),
}
FIELDS = sorted(GenerationRequest.model_fields)


def body_of(fields: dict[str, Any]) -> bytes:
    return json.dumps({"prompt": "1", "steps": 2} | fields).encode()


SOUND_FIELDS = st.fixed_dictionaries({}, optional=SOUND)
WILD_FIELDS = st.dictionaries(st.sampled_from(FIELDS) | TEXTS, JSON, max_size=4)
BODIES = st.one_of(
    SOUND_FIELDS.map(body_of),
    WILD_FIELDS.map(body_of),
    st.builds(lambda sound, wild: body_of(sound | wild), SOUND_FIELDS, WILD_FIELDS),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=200),
    st.builds(lambda fields, at: body_of(fields)[:at], SOUND_FIELDS, st.integers(0, 60)),
    st.builds(
        lambda fields, encoding: body_of(fields).decode().encode(encoding),
        SOUND_FIELDS,
        st.sampled_from(["utf-16", "utf-16-le", "utf-32", "utf-8-sig"]),
    ),
    st.builds(lambda fields: gzip.compress(body_of(fields)), SOUND_FIELDS),
    st.builds(
        lambda deep, opened: b'{"prompt": "1", "user": ' + opened * deep,
        st.sampled_from([10, 1000, 60_000]),
        st.sampled_from([b"[", b'{"a":', b"-", b'"\\ud800', b"1"]),
    ),
    st.sampled_from([10, 5000, 100_000]).map(
        lambda count: json.dumps({f"{number}": 0 for number in range(count)}).encode()
    ),
)
PREFLIGHT = (b"access-control-request-method", b"access-control-request-headers")
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            [b"content-length", b"accept", b"host", b"x-request-id", b"if-none-match", b"range", b"origin", *PREFLIGHT]
        ),
        st.binary(max_size=40) | st.sampled_from([b"-1", b"0", b"1" * 5000, b"*", b"bytes=0-1", b"x" * 4000]),
    ),
    max_size=3,
)
CONTENT_TYPES = st.sampled_from(
    [b"application/json", b"application/json; charset=utf-16", b"text/plain", b"multipart/form-data", b"", b"\xff"]
)
METHODS = st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", ""])
PATHS = st.one_of(
    st.sampled_from([GENERATIONS, *ROUTES]),
    st.builds("{}{}".format, st.sampled_from(ROUTES), st.sampled_from(["/", "//", "/..", "?", "%00", "\r\n", "é"])),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(lambda text: f"/{text}"),
    st.sampled_from([f"/{'x' * 60_000}", "", "*", "/v1/models/" + "y" * 60_000]),
)
TO_IMAGES = st.builds(
    lambda headers, kind, body: Asked("POST", GENERATIONS, (*headers, (b"content-type", kind)), body),
    HEADERS,
    st.just(b"application/json") | CONTENT_TYPES,
    BODIES,
)
TO_ANYWHERE = st.builds(
    lambda method, path, headers, kind, body: Asked(method, path, (*headers, (b"content-type", kind)), body),
    METHODS,
    PATHS,
    HEADERS,
    CONTENT_TYPES,
    BODIES,
)
# As real ones come: without another length, which alone would be refused.
WELL_SENT = BODIES.map(lambda body: Asked("POST", GENERATIONS, ((b"content-type", b"application/json"),), body))


# Of the server's machine: files, processes, addresses, Python's own words.
LEAK = re.compile(
    rb"/(tmp|home|root|usr|work|var|proc)/|site-packages|Traceback|File \\?\"|\.py\b|0x[0-9a-f]{6,}|\bpid\b"
    rb"|(?<![\d.])\d{1,3}(\.\d{1,3}){3}(?![\d.])|ray::|Ray[A-Z]\w+Error"
)


def leaks(asked: Asked, answered: Answered) -> list[bytes]:
    """What an answer tells of the server's machine, but for what was said to it."""
    answer = b"\n".join([*(value for each in answered.headers.items() for value in each), answered.body])
    heard = b"\n".join([asked.path.encode(), *(value for _, value in asked.headers), asked.body])
    return [match[0] for match in LEAK.finditer(answer) if match[0] not in heard]


def test_what_would_be_a_leak_is_seen() -> None:
    asked = Asked("GET", "/v1/models", (), b"")
    for text in (b"no /tmp/x", b'File "x"', b"node 10.0.0.7 died", b"pid 77", b"ray::api", b"<object at 0x7f00aa12>"):
        assert leaks(asked, Answered(200, {}, text)) and leaks(asked, Answered(200, {b"x": text}, b""))
    assert not leaks(asked, Answered(200, {b"etag": b"0.1.0"}, b"2.5.1 of 1024x1024, 0.123456"))


def require_openais(answered: Answered) -> None:
    """An error in OpenAI's form, and short."""
    assert answered.headers[b"content-type"] == b"application/json"
    error = json.loads(answered.body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert 0 < len(error["message"].encode()) <= 1000 and error["type"] in KINDS_OF_REFUSAL
    assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
    assert len(answered.body) < 2000
    assert answered.status != 429 or int(answered.headers[b"retry-after"]) > 0


def test_no_request_is_a_fault_of_the_server(served: Served, every: bool) -> None:
    count = MANY if every else FEW
    statuses, guard = Counter[int](), Guard(served.app)

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(st.one_of(WELL_SENT, WELL_SENT, TO_IMAGES, TO_ANYWHERE))
    def answer(asked: Asked) -> None:
        answered = asyncio.run(ask(guard, asked))
        statuses[answered.status] += 1
        assert answered.status < 500, answered.body
        if answered.headers.get(b"content-type", b"") not in (b"image/png", b"text/javascript; charset=utf-8"):
            assert not leaks(asked, answered)
        if answered.status == 304 or asked.method == "HEAD":
            assert answered.body == b""
        elif answered.status >= 300:
            require_openais(answered)

    answer()
    print(f"{sum(statuses.values())} requests: {dict(sorted(statuses.items()))}")
    assert min(statuses[200], statuses[400]) > 10
