"""Schemes by which clients prove that they may ask, by the name that `authentication` gives in a configuration.

A new scheme is a file in this folder, with a class like `BearerTokens`, and a line in AUTHENTICATION. Configuration,
help and docs/reference/configuration.md then list it; tests/serve/http/test_authentication.py covers it once it can
issue its credentials.
"""

from typing import TYPE_CHECKING, Literal

from ddm_ray.serve.http.authentication.authenticator import Authenticator
from ddm_ray.serve.http.authentication.bearer import BearerTokens

AUTHENTICATION: dict[str, type[Authenticator]] = {
    "bearer": BearerTokens,
}

if TYPE_CHECKING:
    AuthenticationName = str
else:
    AuthenticationName = Literal[tuple(AUTHENTICATION)]

ABOUT = "; ".join(f"{name}: {scheme.about}" for name, scheme in AUTHENTICATION.items())
"""A line on each scheme, for help and documentation."""
