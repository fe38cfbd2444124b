"""Pages of other origins: which of them a browser lets ask this server (CORS). No Ray."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from ddm_ray.serve.http.openai_errors import error_body


class Origins(CORSMiddleware):
    """An application, for pages of these origins, too. It answers their preflights, which have no token, itself.

    A preflight asks if a page may ask: its answer says nothing of the model. Pages of other origins are refused in
    OpenAI's form; a browser keeps other answers from them, too.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], advice: str):
        """`advice` to pages of other origins."""
        self._advice = advice
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),  # OpenAI's client for browsers sends several of its own
            allow_private_network=True,
            expose_headers=("Retry-After", "X-Degraded", "X-Experts", "X-Seed", "X-Truncated"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a preflight; without one of these origins it is a refusal."""
        origin = request_headers["origin"]
        if not self.is_allowed_origin(origin):
            message = f"a page of {origin[:60]!r} may not ask this server: {self._advice}"
            return JSONResponse(error_body(message, None, "unknown_origin"), 403, {"Vary": "Origin"})
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        method = request_headers["access-control-request-method"][:20]
        return JSONResponse(error_body(f"no path takes the method {method!r}", None, None), 405, {"Vary": "Origin"})
