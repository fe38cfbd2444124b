"""JSON objects with a checksum over themselves: whoever reads one notices an altered byte."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from ddm_ray.errors import CorruptArtifact, DataError, StorageError
from ddm_ray.parsing import parse_object
from ddm_ray.remedies import Fix
from ddm_ray.store.store import Store

RECORD_BYTES = 2**26
"""Bytes of a manifest, a plan, a chunk's record and of run.json that are read at most."""


def sha256(data: bytes | memoryview) -> str:
    """Hex SHA-256."""
    return hashlib.sha256(data).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces, so that equal values have equal bytes."""
    as_read = json.loads(json.dumps(value))  # keys that are numbers sort otherwise once they are strings
    return json.dumps(as_read, sort_keys=True, separators=(",", ":")).encode()


def digest_of_list(texts: Iterable[str]) -> str:
    """`sha256(canonical([*texts]))`, of texts one at a time."""
    digest, comma = hashlib.sha256(b"["), b""
    for text in texts:
        digest.update(comma + canonical(text))
        comma = b","
    digest.update(b"]")
    return digest.hexdigest()


def seal(body: dict[str, Any], indent: int | None = None) -> bytes:
    """The object with its `checksum`, a line of canonical JSON, or indented for people to read.

    Raises DataError for one that `read_sealed` would refuse for its size.
    """
    sealed = {**body, "checksum": sha256(canonical(body))}
    data = (canonical(sealed) if indent is None else json.dumps(sealed, indent=indent).encode()) + b"\n"
    if len(data) > RECORD_BYTES:
        raise DataError(f"a record would have {len(data):,} bytes, and {RECORD_BYTES:,} are read at most")
    return data


def read_some(store: Store, key: str, most: int, cut: bool = True) -> bytes:
    """An object as `Store.read` reads it. Raises CorruptArtifact also where a disk refuses this one, not for now."""
    try:
        return store.read(key, most, cut)
    except StorageError as error:
        if error.passes:
            raise
        raise CorruptArtifact(error.message, error.fix) from None


def read_sealed(store: Store, key: str) -> bytes:
    """The bytes of an object that was sealed. Raises CorruptArtifact for one that is too large, FileNotFoundError."""
    return read_some(store, key, RECORD_BYTES, cut=False)


def unseal(data: bytes, where: str, fields: Iterable[str] = (), fix: Fix | None = None) -> dict[str, Any]:
    """The object that was sealed. Raises CorruptArtifact naming `where`, with this `fix`, if it is cut short, was
    altered, or lacks `fields`, being something else.
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
