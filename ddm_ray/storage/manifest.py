"""Manifests finish artifacts: checksums, identity, and drift as a diff of fields."""

import builtins
import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddm_ray.errors import CorruptArtifact, TruncatedWeights
from ddm_ray.storage.sealed import canonical, seal, sha256, unseal

SCHEMA = 5
NAME = "_MANIFEST.json"
AGAIN = "delete it and run the stage again"


@dataclass(frozen=True)
class Identity:
    """The circumstances of an artifact: the configuration fields that its stage reads, and its inputs' digests."""

    fields: dict[str, Any]
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the hash over fields and inputs."""
        return sha256(canonical({"fields": self.fields, "inputs": self.inputs}))[:16]

    def without(self, names: Collection[str]) -> "Identity":
        """The identity of what is made without these inputs."""
        return Identity(self.fields, {name: digest for name, digest in self.inputs.items() if name not in names})


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file of an artifact."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, data: builtins.bytes | memoryview) -> "FileRecord":
        """The record of a file's content."""
        return cls(len(data), sha256(data))

    @classmethod
    def of_file(cls, path: Path) -> "FileRecord":
        """The record of a file on a local disk, which is read a piece at a time."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


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
        return seal(body, indent=1)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> "Manifest":
        """Parse and verify. Raises CorruptArtifact naming `where` if altered, or of another schema."""
        body = unseal(data, where, fix=AGAIN)
        try:
            if body["schema"] != SCHEMA:
                raise CorruptArtifact(f"{where}: schema {body['schema']}, this version reads {SCHEMA}")
            return cls(
                artifact=body["artifact"],
                identity=Identity(**body["identity"]),
                files={name: FileRecord(**record) for name, record in body["files"].items()},
                info=body["info"],
                content=body["content"],
            )
        except (KeyError, AttributeError, TypeError):
            raise CorruptArtifact(f"{where}: not whole", AGAIN) from None


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


def drift(expected: Identity, actual: Identity) -> list[str]:
    """A line `field: actual -> expected` for each difference; inputs unknown on either side don't count."""
    lines = list(_differences(actual.fields, expected.fields))
    for name in sorted(expected.inputs.keys() & actual.inputs.keys()):
        if expected.inputs[name] != actual.inputs[name]:
            lines.append(f"input {name}: {actual.inputs[name]} -> {expected.inputs[name]}")
    return lines


def _differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path}: {json.dumps(old)} -> {json.dumps(new)}"
