"""Manifests: what makes an artifact finished. Checksums, identity, and drift told as a diff of fields."""

import builtins
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ddm_ray.errors import CorruptArtifact, TruncatedWeights

SCHEMA = 5
NAME = "_MANIFEST.json"


def sha256(data: bytes | memoryview) -> str:
    """Hex SHA-256."""
    return hashlib.sha256(data).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces, so that equal values have equal bytes."""
    as_read = json.loads(json.dumps(value))  # keys that are numbers sort otherwise once they are strings
    return json.dumps(as_read, sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Identity:
    """What an artifact was made under: the configuration fields its stage reads, and its inputs' digests."""

    fields: dict[str, Any]
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the hash over fields and inputs."""
        return sha256(canonical({"fields": self.fields, "inputs": self.inputs}))[:16]


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file of an artifact."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, data: builtins.bytes | memoryview) -> "FileRecord":
        """That of a file's content."""
        return cls(len(data), sha256(data))


@dataclass(frozen=True)
class Manifest:
    """The record written last: files by path below the artifact's prefix, identity, and the stage's info.

    `content` is a hash of what the files hold, given where their bytes or names depend on chance.
    """

    artifact: str
    identity: Identity
    files: dict[str, FileRecord]
    info: dict[str, Any]
    content: str | None = None

    @property
    def digest(self) -> str:
        """16 hex digits of the hash over the content (else the files' checksums) and the inputs' digests."""
        files = self.content or {name: record.sha256 for name, record in self.files.items()}
        return sha256(canonical({"files": files, "inputs": self.identity.inputs}))[:16]

    def to_json(self) -> bytes:
        """The manifest as an indented JSON object with a checksum over itself."""
        body = {"schema": SCHEMA, "fingerprint": self.identity.fingerprint, **asdict(self)}
        return json.dumps({**body, "checksum": sha256(canonical(body))}, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, where: str) -> "Manifest":
        """Parse and verify. Raises CorruptArtifact naming `where` if altered, or of another schema."""
        try:
            body = json.loads(data)
            checksum = body.pop("checksum")
            if checksum != sha256(canonical(body)):
                raise CorruptArtifact(f"{where}: altered since it was written; delete it and run the stage again")
            if body["schema"] != SCHEMA:
                raise CorruptArtifact(f"{where}: schema {body['schema']}, this version reads {SCHEMA}")
            return cls(
                artifact=body["artifact"],
                identity=Identity(**body["identity"]),
                files={name: FileRecord(**record) for name, record in body["files"].items()},
                info=body["info"],
                content=body["content"],
            )
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CorruptArtifact(f"{where}: not a whole manifest; delete it and run the stage again") from None


def verify(data: bytes, record: FileRecord, where: str) -> bytes:
    """`data` itself, if it has the recorded size and checksum; else CorruptArtifact naming `where`, TruncatedWeights
    for safetensors of another size.
    """
    if len(data) != record.bytes:
        kind = TruncatedWeights if where.endswith(".safetensors") else CorruptArtifact
        raise kind(f"{where}: {len(data)} bytes, its manifest says {record.bytes}")
    if sha256(data) != record.sha256:
        raise CorruptArtifact(f"{where}: checksum differs from its manifest's")
    return data


def drift(wanted: Identity, found: Identity) -> list[str]:
    """`field: found -> wanted` for all that differs; inputs unknown on either side don't count."""
    lines = list(_differences(found.fields, wanted.fields))
    for name in sorted(wanted.inputs.keys() & found.inputs.keys()):
        if wanted.inputs[name] != found.inputs[name]:
            lines.append(f"input {name}: {found.inputs[name]} -> {wanted.inputs[name]}")
    return lines


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path}: {json.dumps(old)} -> {json.dumps(new)}"
