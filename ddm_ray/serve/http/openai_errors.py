"""OpenAI's error object, and the statuses that it comes with, as in the OpenAPI schema. No Ray, no HTTP."""

import math
from typing import Any

from pydantic import BaseModel

from ddm_ray.spelling import one_line

MAX_MESSAGE = 900


class Error(BaseModel):
    """OpenAI's error; `param` is the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's error object."""

    error: Error


Responses = dict[int | str, dict[str, Any]]
_STATUSES: dict[int | str, str] = {
    400: "A field that can't be met, or no JSON",
    401: "No token of this server's",
    404: "Another model",
    408: "The body came too slowly, or the request's time is over",
    413: "The body is too large",
    421: "Another host's name, where only this machine may ask",
    429: "More is asked for than can be made in time; see Retry-After",
    "4XX": "Another refusal",  # without it FastAPI adds a 422, which nothing here sends
    500: "A fault of the server",
    503: "It can't be answered now, as while no expert has a replica; see Retry-After",
}
REFUSALS: Responses = {status: {"model": ErrorAnswer, "description": text} for status, text in _STATUSES.items()}
OF_ANY_ROUTE: Responses = {status: REFUSALS[status] for status in (401, 408, 413, 421, "4XX", 500)}


def error_body(message: str, param: str | None, code: str | None, server: bool = False) -> dict[str, Any]:
    """OpenAI's error object; `server`: the fault isn't the request's."""
    kind = "server_error" if server else "invalid_request_error"
    return {"error": {"message": one_line(message, MAX_MESSAGE), "type": kind, "param": param, "code": code}}


def internal_error(error: Exception) -> dict[str, Any]:
    """OpenAI's object for an unexpected error, without its text, which may have what clients mustn't see."""
    message = f"an error of the server, not of the request: {type(error).__name__}"
    return error_body(message, None, "internal_error", server=True)


def retry_after(seconds: float) -> str:
    """Value of the header Retry-After: whole seconds, one at least."""
    return str(max(1, math.ceil(seconds)))
