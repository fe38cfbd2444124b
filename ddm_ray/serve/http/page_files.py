"""The page at `/`: the files of `page/`, which call the API like any other client. No Ray."""

import hashlib
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.routing import Route

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = {
    "/" if file.name == "index.html" else f"/page/{file.name}": file
    for file in sorted((Path(__file__).parent / "page").iterdir())
    if file.suffix in TYPES
}
"""Files by their paths. They have nothing of the model, so they are open to everybody."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: everything from this server, nothing inline, no frame around it."""


def add_page(http: FastAPI) -> None:
    """Add a route for each file of the page."""
    for path, file in FILES.items():
        data = file.read_bytes()
        headers = {
            "Content-Type": TYPES[file.suffix],
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            # Asked for again each time, so that a page never speaks to a server of another version.
            "Cache-Control": "no-cache",
            "ETag": f'"{hashlib.sha256(data).hexdigest()[:16]}"',
        }
        http.router.routes.append(Route(path, partial(_answer, data, headers), include_in_schema=False))


async def _answer(data: bytes, headers: dict[str, str], request: Request) -> Response:
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers)
