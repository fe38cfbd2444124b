"""Arguments of the Serve application, from a config file or the command line."""

import re
from typing import Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from ddm_ray.config import Precision, StrictModel
from ddm_ray.serve.engine.scheduler import MAX_ROWS
from ddm_ray.serve.http.authentication import ABOUT, AUTHENTICATION, AuthenticationName, Authenticator
from ddm_ray.serve.http.authentication.bearer import TOKENS

EVERY = "*"
"""Stands for all origins."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@\[\]:*]+)(:[0-9]+)?")
_USUAL_PORTS = {"http": ":80", "https": ":443"}


def as_origin(text: str) -> str:
    """The origin as browsers write it. Raises ValueError if it is none: an origin has a scheme and a host, no path."""
    origin = text.strip().lower().removesuffix("/")
    origin = origin.removesuffix(_USUAL_PORTS.get(origin.partition("://")[0], "/"))
    if origin != EVERY and not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{text[:60]!r} is no origin: give scheme, host and port, as http://localhost:3000")
    return origin


class ServeArgs(StrictModel):
    """Arguments of `build_app`, as a config file gives them.

    A field that is added here, with its range and its description, is an option of the command line, too.
    """

    run: str = Field(description="Absolute path or URI of a run, as the serving machines see it.")
    placement: Literal["colocated", "multiplexed", "per-expert"] = Field(
        default="colocated",
        description="colocated: each replica of `api`, the ingress, has all experts, and nothing crosses the network;"
        " multiplexed: likewise, but in host memory, and a few of them at a time on the device, for many experts with"
        " few requests each; per-expert: a deployment for each expert, which scales by itself.",
    )
    replicas: PositiveInt = Field(
        default=1,
        description="Processes of `api`, which answer requests, also while one that died starts again. Each has all"
        " experts unless they are placed per-expert.",
    )
    resident: int = Field(default=2, ge=2, description="Multiplexed experts on the device at a time.")
    dense: Literal["monolith", "student"] | None = Field(
        default=None,
        description="A network to serve as a model of its own beside the mixture, RUN'S NAME-monolith or -student: a"
        " deployment `dense`.",
    )
    device: str = Field(
        default="cpu", description="torch's device for experts and router; auto: cuda if this Ray has a GPU, else cpu."
    )
    max_rows: PositiveInt = Field(default=MAX_ROWS, description="Images of a batch; more wait.")
    pin_file: str | None = Field(
        default=None,
        description="Path or URI of a YAML file with a line such as `expert-002: 400` for each network that is to serve"
        " its weights of that step in place of the newest, and `run: URL` for another run, with images of the same form"
        ", to be served in place of this one. It may come later.",
    )
    refresh_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds between two looks for newer weights and other pins, until all is final.",
    )
    precision: Precision | None = Field(
        default=None,
        description="Precision of experts and router. Default: bf16 on a GPU that has it, which takes half the memory"
        " and a fraction of the time; else fp32.",
    )
    compile: bool = Field(
        default=False,
        description="Compile experts and router for calls of a few sizes, which others are padded to, and on a GPU make"
        " each size a CUDA graph: minutes at the start, faster steps.",
    )
    authentication: AuthenticationName = Field(
        default="bearer", description=f"Scheme by which clients prove that they may ask. {ABOUT}."
    )
    token_file: str | None = Field(
        default=None,
        description="File with tokens that clients may have, one a line, where this is called. Default: those in"
        f" ${TOKENS} there; without any, everybody may ask.",
    )
    per_minute: float | None = Field(
        default=None,
        gt=0,
        description="Requests for images a minute and token, which each replica of `api` counts by itself. Default:"
        " any number.",
    )
    allow_origin: tuple[str, ...] = Field(
        default=(),
        description="Origins, as http://localhost:3000: their pages may ask from a browser, as the server's own may; *:"
        " all. As an option: once for each.",
    )
    local: bool = Field(
        default=False,
        description="Answer only requests by localhost or an IP address: where there are no tokens, any page in a"
        " browser on the machine could ask otherwise, by a name of its own that leads here.",
    )

    def authenticator(self) -> Authenticator | None:
        """Read the credentials that clients may have; None: everybody may ask. Raises ConfigError."""
        return AUTHENTICATION[self.authentication].read(self.token_file)

    @field_validator("allow_origin")
    @classmethod
    def _as_browsers_write_them(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(as_origin(origin) for origin in origins)

    @model_validator(mode="after")
    def _compiled_where_weights_stay(self) -> Self:
        if self.compile and self.placement == "multiplexed":
            raise ValueError("compile: multiplexed experts aren't compiled; use another placement")
        return self
