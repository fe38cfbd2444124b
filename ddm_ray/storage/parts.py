"""Parts of an archive: the artifacts that an archive brings, by their manifests, which others may have written."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from ddm_ray.errors import ArchiveError, CorruptArtifact
from ddm_ray.spelling import printable
from ddm_ray.storage.archive import AGAIN, NAME_LETTERS
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.info import TrainedInfo
from ddm_ray.storage.manifest import NAME, FileRecord, Manifest
from ddm_ray.storage.sealed import canonical, sha256

BROUGHT = "unpacked"
"""Folder of a trained artifact for what came in an archive: no attempt of any store writes there."""
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*(/[A-Za-z0-9][A-Za-z0-9._=-]*)*")


@dataclass(frozen=True)
class ArchivePart:
    """An artifact in an archive: its manifest, parsed and as bytes."""

    artifact: Artifact
    manifest: Manifest
    data: bytes

    @property
    def key(self) -> str:
        """Key of its manifest in the run."""
        return f"{self.artifact}/{NAME}"

    @property
    def files(self) -> dict[str, FileRecord]:
        """Files by their keys in the run, without manifests of artifacts below it."""
        return {f"{self.artifact}/{name}": each for name, each in self.manifest.files.items() if not _is_manifest(name)}

    @property
    def below(self) -> dict[str, FileRecord]:
        """The manifests that it names, by the paths of their artifacts, as a partition does."""
        names = {name: each for name, each in self.manifest.files.items() if _is_manifest(name)}
        return {f"{self.artifact}/{name.removesuffix(f'/{NAME}')}": each for name, each in names.items()}


def parts_below(roots: Iterable[Artifact], read: Callable[[Artifact], bytes], where: object) -> Iterator[ArchivePart]:
    """The roots and, after each, the artifacts whose manifests it names: in one order for who packs and who unpacks.

    `read` gives a manifest's bytes. Raises ArchiveError, which begins with `where`.
    """
    pending: list[tuple[Artifact, FileRecord | None]] = [(root, None) for root in roots]
    while pending:
        artifact, record = pending.pop(0)
        part = parse_part(artifact, read(artifact), where)
        if record is not None and FileRecord.of(part.data) != record:
            raise ArchiveError(f"{where}: {part.key}: isn't the one that the artifact above it lists", AGAIN)
        yield part
        for path, listed in part.below.items():
            try:
                pending.append((Artifact(path), listed))
            except ValueError:
                raise ArchiveError(f"{where}: {part.key}: names {printable(path, 80)}, which is no artifact") from None


def parse_part(artifact: Artifact, data: bytes, where: object) -> ArchivePart:
    """Parse a manifest by type. Raises ArchiveError, which begins with `where`."""
    key = f"{artifact}/{NAME}"
    try:
        manifest = Manifest.from_json(data, key)
        altered = manifest.to_json() != data
    except CorruptArtifact as error:
        raise ArchiveError(f"{where}: {printable(error.message, 200)}", AGAIN) from None
    if altered:
        raise ArchiveError(f"{where}: {key}: isn't spelled as it was written", AGAIN)
    if manifest.artifact != artifact:
        raise ArchiveError(f"{where}: {key}: is that of {printable(manifest.artifact, 80)}", AGAIN)
    try:
        artifact.info.of(manifest)
    except CorruptArtifact:
        raise ArchiveError(f"{where}: {key}: its info isn't that of a finished {artifact.kind}", AGAIN) from None
    for name in manifest.files:
        if not _FILE.fullmatch(name.removesuffix(f"/{NAME}")) or len(f"{artifact}/{name}") > NAME_LETTERS:
            shown = repr(printable(name, 80))
            raise ArchiveError(f"{where}: {key}: names {shown}, as no file of an archive may be called")
    return ArchivePart(artifact, manifest, data)


def files_of(parts: list[ArchivePart], where: object) -> dict[str, FileRecord]:
    """All files by their keys. Raises ArchiveError for a key that is named twice, or is a folder's, too."""
    records: dict[str, FileRecord] = {}
    for part in parts:
        for key, record in part.files.items():
            if key in records:
                raise ArchiveError(f"{where}: {part.key}: names {key}, which another manifest names, too")
            records[key] = record
    names = records.keys() | {part.key for part in parts}
    for key in names:
        if inside := {str(folder) for folder in PurePosixPath(key).parents} & names:
            raise ArchiveError(f"{where}: {key}: lies in {min(inside)}, which is a file")
    return records


def by_content(manifest: Manifest) -> Manifest:
    """The manifest of a trained artifact with its files in a folder called by their checksums; applied again, the same.

    In an attempt's folder they would mix with those of another site's attempt of that number. Raises ArchiveError.
    """
    folder = f"{TrainedInfo.of(manifest).weights}/"
    for name in manifest.files:
        if not name.startswith(folder):
            raise ArchiveError(f"{manifest.artifact}/{NAME}: names {printable(name, 80)}, which isn't of its weights")
    records = {name.removeprefix(folder): record for name, record in sorted(manifest.files.items())}
    digest = sha256(canonical({name: record.sha256 for name, record in records.items()}))[:16]
    brought = f"{BROUGHT}/{digest}"
    files = {f"{brought}/{name}": record for name, record in records.items()}
    return Manifest(
        manifest.artifact, manifest.identity, files, {**manifest.info, "weights": brought}, manifest.content
    )


def _is_manifest(name: str) -> bool:
    return name.endswith(f"/{NAME}")
