"""JSON objects with a checksum over themselves: whoever reads one notices an altered byte."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from ddm_ray.errors import CorruptArtifact, Fix


def sha256(data: bytes | memoryview) -> str:
    """Hex SHA-256."""
    return hashlib.sha256(data).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces, so that equal values have equal bytes."""
    as_read = json.loads(json.dumps(value))  # keys that are numbers sort otherwise once they are strings
    return json.dumps(as_read, sort_keys=True, separators=(",", ":")).encode()


def seal(body: dict[str, Any], indent: int | None = None) -> bytes:
    """The object with its `checksum`, a line of canonical JSON, or indented for people to read."""
    sealed = {**body, "checksum": sha256(canonical(body))}
    return (canonical(sealed) if indent is None else json.dumps(sealed, indent=indent).encode()) + b"\n"


def unseal(data: bytes, where: str, fields: Iterable[str] = (), fix: Fix | None = None) -> dict[str, Any]:
    """The object that was sealed. Raises CorruptArtifact naming `where`, with this `fix`, if it is cut short, was
    altered, or lacks `fields`, being something else.
    """
    try:
        body: dict[str, Any] = json.loads(data)
        checksum, actual = body.pop("checksum"), sha256(canonical(body))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CorruptArtifact(f"{where}: not whole", fix) from None
    if checksum != actual:
        raise CorruptArtifact(f"{where}: altered since it was written", fix)
    if not body.keys() >= set(fields):
        raise CorruptArtifact(f"{where}: is the record of something else", fix)
    return body
