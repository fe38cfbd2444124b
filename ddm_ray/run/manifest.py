"""Manifests, which commit artifacts: checksums, identity, and drift as a diff of fields."""

import builtins
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ddm_ray.errors import CorruptArtifact, DataError, DDMError
from ddm_ray.remedies import Fix
from ddm_ray.spelling import one_line, printable
from ddm_ray.store.checksummed import canonical, read_sealed, seal, sha256, unseal
from ddm_ray.store.store import Store

SCHEMA = 5
NAME_LETTERS = 1024
"""Longest path of a file below its artifact, in characters. Object stores allow no more."""
NAME = "_MANIFEST.json"
AGAIN = "delete it and run the stage again"


@dataclass(frozen=True)
class Identity:
    """The origin of an artifact: the configuration fields that its stage reads, and its inputs' digests."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    fields: dict[str, Any]
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the hash over fields and inputs."""
        return sha256(canonical({"fields": self.fields, "inputs": self.inputs}))[:16]

    def without(self, names: Collection[str]) -> "Identity":
        """The identity without the inputs of these names."""
        return Identity(self.fields, {name: digest for name, digest in self.inputs.items() if name not in names})


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file of an artifact."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    bytes: Annotated[int, Field(strict=True, ge=0, lt=2**63)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @classmethod
    def of(cls, data: builtins.bytes | memoryview) -> "FileRecord":
        """The record of a file's content."""
        return cls(len(data), sha256(data))

    @classmethod
    def of_file(cls, path: Path) -> "FileRecord":
        """The record of a file on a local disk, which is read in pieces."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def checked_name(name: str) -> str:
    """Return the name if a file below an artifact may have it. Raises ValueError otherwise."""
    parts = name.split("/")
    if (
        len(name) > NAME_LETTERS
        or not name.isprintable()
        or any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
    ):
        raise ValueError("no file is called so")
    return name


FileName = Annotated[str, AfterValidator(checked_name)]
"""A path below an artifact: no `..`, only printable characters, and parts that any file system accepts."""


class _Body(BaseModel):
    """The fields of a manifest, without those that follow from others."""

    model_config = ConfigDict(extra="ignore")

    number: Annotated[int, Field(alias="schema")]
    artifact: FileName
    identity: Identity
    files: dict[FileName, FileRecord]
    info: dict[str, Any]
    content: Annotated[str, Field(max_length=128)] | None


@dataclass(frozen=True)
class Manifest:
    """The record written last: files by path below the artifact's prefix, identity, and the stage's info.

    `content` is a hash of the files' content, set if their bytes or names depend on chance. If there are very many
    files, `files` names a list of them, see `listing.py`.
    """

    artifact: str
    identity: Identity
    files: Mapping[str, FileRecord]
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

    def to_write(self, where: str) -> bytes:
        """`to_json`, after a check that `read_manifest` can read the result. Raises DataError naming `where` if not.

        Otherwise the error would show only when the result of a week's work is to be used.
        """
        try:
            data = self.to_json()
            Manifest.from_json(data, where)
        except (DDMError, ValueError, TypeError, RecursionError) as error:
            reason = one_line(error.message if isinstance(error, DDMError) else error)
            raise DataError(f"{where}: can't be written, with {len(self.files):,} files: {reason}") from None
        return data

    @classmethod
    def from_json(cls, data: bytes, where: str, fix: Fix | None = None) -> "Manifest":
        """Parse by type and verify. Raises CorruptArtifact naming `where` if altered, or of another schema."""
        body = unseal(data, where, fix=fix or AGAIN)
        if body.get("schema", SCHEMA) != SCHEMA:
            raise CorruptArtifact(f"{where}: schema {printable(body['schema'], 20)}, this version reads {SCHEMA}")
        try:
            fields = _Body.model_validate(body)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
            field = printable(".".join(map(str, problem["loc"])), 200)
            raise CorruptArtifact(f"{where}: not whole, {field}: {problem['msg']}", fix or AGAIN) from None
        return cls(fields.artifact, fields.identity, fields.files, fields.info, fields.content)


def read_manifest(store: Store, prefix: str, fix: Fix | None = None) -> Manifest:
    """The manifest below `prefix/`. Raises FileNotFoundError if there is none, and CorruptArtifact with this `fix`."""
    key = f"{prefix}/{NAME}"
    return Manifest.from_json(read_sealed(store, key), f"{store.url}/{key}", fix)


def verify(data: bytes, record: FileRecord, where: str) -> bytes:
    """Return `data` if it has the recorded size and checksum.

    Raises CorruptArtifact naming `where` otherwise.
    """
    if len(data) != record.bytes:
        raise CorruptArtifact(f"{where}: {len(data)} bytes, its manifest says {record.bytes}")
    if sha256(data) != record.sha256:
        raise CorruptArtifact(f"{where}: checksum differs from its manifest's")
    return data


def read_verified(store: Store, key: str, record: FileRecord) -> bytes:
    """Read a file up to its recorded size and `verify` it. Raises FileNotFoundError, too."""
    return verify(store.read(key, record.bytes, cut=False), record, f"{store.url}/{key}")


def drift(expected: Identity, actual: Identity) -> list[str]:
    """A line `field: actual -> expected` for each difference. Inputs that either side lacks don't count."""
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
