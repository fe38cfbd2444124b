"""The interface of a scheme of authentication. Standard library only: configuration imports it."""

from collections.abc import Mapping
from typing import ClassVar, Protocol, Self


class Authenticator(Protocol):
    """The credentials that a server accepts. Ray pickles it for each replica of the ingress."""

    about: ClassVar[str]
    """The scheme in a few words, for help and documentation."""
    challenge: ClassVar[str]
    """Value of the header WWW-Authenticate in a refusal."""
    header: ClassVar[str]
    """The header that a client sends, with a word in capitals in place of its credential."""

    @classmethod
    def read(cls, path: str | None) -> Self | None:
        """Read the credentials in a file, or where the scheme looks without one; None: everybody may ask.

        Raises ConfigError for a file that can't be read or has no credentials, or for weak ones.
        """

    def caller(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return an identifier of the client, by which its requests are counted; None if it has no right credential.

        `headers` of the request by their lower-case names. The time that this takes must tell nothing of a credential.
        """
