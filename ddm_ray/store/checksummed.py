"""JSON objects that hold a checksum over themselves, so that a reader notices an altered byte."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from ddm_ray.errors import CorruptArtifact, DataError, StorageError
from ddm_ray.parsing import parse_object
from ddm_ray.remedies import Fix
from ddm_ray.store.store import Store

RECORD_BYTES = 2**26
"""Largest size in bytes at which a manifest, a plan, a chunk's record or run.json is read."""


def sha256(data: bytes | memoryview) -> str:
    """Hex SHA-256."""
    return hashlib.sha256(data).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces, so that equal values have equal bytes."""
    as_read = json.loads(json.dumps(value))  # integer keys become strings, which sort in another order
    return json.dumps(as_read, sort_keys=True, separators=(",", ":")).encode()


def digest_of_list(texts: Iterable[str]) -> str:
    """`sha256(canonical([*texts]))`, with one text in memory at a time."""
    digest, comma = hashlib.sha256(b"["), b""
    for text in texts:
        digest.update(comma + canonical(text))
        comma = b","
    digest.update(b"]")
    return digest.hexdigest()


def seal(body: dict[str, Any], indent: int | None = None) -> bytes:
    """The object with its `checksum`, as one line of canonical JSON, or indented for people to read.

    Raises DataError for an object that `read_sealed` would refuse for its size.
    """
    checksummed = {**body, "checksum": sha256(canonical(body))}
    data = (canonical(checksummed) if indent is None else json.dumps(checksummed, indent=indent).encode()) + b"\n"
    if len(data) > RECORD_BYTES:
        raise DataError(f"a record would have {len(data):,} bytes, and {RECORD_BYTES:,} are read at most")
    return data


def read_some(store: Store, key: str, most: int, cut: bool = True) -> bytes:
    """An object as `Store.read` reads it. A lasting refusal of a local disk raises CorruptArtifact, too."""
    try:
        return store.read(key, most, cut)
    except StorageError as error:
        if error.passes:
            raise
        raise CorruptArtifact(error.message, error.fix) from None


def read_sealed(store: Store, key: str) -> bytes:
    """The bytes of a checksummed object. Raises FileNotFoundError, and CorruptArtifact for one that is too large."""
    return read_some(store, key, RECORD_BYTES, cut=False)


def unseal(data: bytes, where: str, fields: Iterable[str] = (), fix: Fix | None = None) -> dict[str, Any]:
    """Parse a checksummed object and verify it.

    Raises CorruptArtifact, which names `where` and has this `fix`, for an object that is cut short, was altered, or
    lacks one of `fields`.
    """
    try:
        body = parse_object(data)
        checksum, actual = body.pop("checksum"), sha256(canonical(body))
    except (ValueError, KeyError):
        raise CorruptArtifact(f"{where}: not whole", fix) from None
    if checksum != actual:
        raise CorruptArtifact(f"{where}: altered since it was written", fix)
    if not body.keys() >= set(fields):
        raise CorruptArtifact(f"{where}: is the record of something else", fix)
    return body
