"""Bearer tokens: a client sends one of the tokens in the server's file. Standard library only."""

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from ddm_ray.errors import ConfigError
from ddm_ray.plain_text import from_utf8, words_of_lines
from ddm_ray.spelling import one_line

TOKENS = "DDM_SERVE_TOKENS"
"""Variable with tokens, separated by spaces or new lines, where no file is named."""
MIN_CHARACTERS = 16


@dataclass(frozen=True)
class BearerTokens:
    """Tokens that a client may send, as `digests`: no process keeps the tokens themselves."""

    about: ClassVar[str] = "a token of the file, sent as Authorization: Bearer TOKEN"
    challenge: ClassVar[str] = "Bearer"
    header: ClassVar[str] = "Authorization: Bearer TOKEN"

    digests: tuple[bytes, ...]

    @classmethod
    def read(cls, path: str | None) -> Self | None:
        """Read the tokens in a file, one a line with comments after `#`, or in $DDM_SERVE_TOKENS; None if it has none.

        ConfigError for a file that can't be read or has none, or for a token of less than 16 characters.
        """
        try:
            data = os.environ.get(TOKENS, "").encode() if path is None else Path(path).expanduser().read_bytes()
            tokens = words_of_lines(from_utf8(data))
        except (OSError, ValueError) as error:
            raise ConfigError(f"token_file {path}: {one_line(error, 200)}") from None
        if path is not None and not tokens:
            advice = "write one token a line, as `openssl rand -hex 32` makes them"
            raise ConfigError(f"token_file {path} is empty: {advice}")
        if any(len(token) < MIN_CHARACTERS for token in tokens):
            where = f"${TOKENS}" if path is None else f"token_file {path}"
            advice = "`openssl rand -hex 32` makes good ones"
            raise ConfigError(f"{where}: a token has less than {MIN_CHARACTERS} characters; {advice}")
        # Sorted: Serve replaces all replicas where arguments differ, and a set has another order in each process.
        return cls(tuple(sorted({_digest(token.encode()) for token in tokens}))) if tokens else None

    def caller(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the digest of the token in the header Authorization, None if it isn't one of these."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        own = _digest(token.strip())
        # All are compared, so that time tells nothing of any.
        known = [hmac.compare_digest(own, digest) for digest in self.digests]
        return own if scheme.lower() == b"bearer" and any(known) else None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
