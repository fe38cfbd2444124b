"""Courier: an artifact's way between two stores that have nothing in common, as an archive that anyone may carry.

An archive holds, in this order: CONTENTS, run.json, manifests, and the files that these name.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ddm_ray.errors import ArchiveError, ConfigError, CorruptArtifact, DDMError, DriftError, StorageError
from ddm_ray.remedies import Give
from ddm_ray.spelling import printable
from ddm_ray.storage import graph
from ddm_ray.storage.archive import AGAIN, ArchiveReader, ArchiveWriter, read_archive, write_archive
from ddm_ray.storage.graph import PARTITION, Artifact
from ddm_ray.storage.manifest import NAME, FileRecord, Identity, Manifest, drift
from ddm_ray.storage.parts import BROUGHT, ArchivePart, by_content, files_of, parse_part, parts_below
from ddm_ray.storage.refusals import as_storage_error
from ddm_ray.storage.run import RUN_FILE, Run, read_config
from ddm_ray.storage.sealed import read_sealed, seal, unseal
from ddm_ray.storage.store import Store

Holds = Literal["inputs", "result"]
"""Content of an archive: all that an artifact is trained from, or what was trained."""
Report = Callable[[float, str], None]
"""Called with the share that is done, 0 to 1, and what comes now."""

CONTENTS, SCHEMA = "ddm-archive.json", 1
CONTENTS_BYTES, RUN_BYTES, MANIFEST_BYTES = 2**12, 2**20, 2**26
"""Bytes of CONTENTS, of run.json and of all manifests together that are read at most."""


@dataclass(frozen=True)
class Packed:
    """An archive's content: how many files, manifests aside, and of how many bytes.

    `written`: how many of them had to be written, not being where they belong already.
    """

    artifact: Artifact
    holds: Holds
    files: int
    bytes: int
    written: int


def _silent(share: float, note: str) -> None:
    """Report nothing."""


def pack(run: Run, artifact: Artifact, path: Path, holds: Holds | None = None, report: Report = _silent) -> Packed:
    """Write an archive of what is needed to train an artifact, or of what was trained, to a local file.

    `holds`: which of them; by itself the result if it is finished, else its inputs. A file that is there is replaced.
    Raises MissingArtifact, CorruptArtifact, DriftError, StorageError, and ConfigError for what isn't trained here, and
    where shards are given and nobody has said that their rows may leave.
    """
    if artifact not in graph.trained_of(run.config):
        raise ConfigError(f"{run.url}: this run trains no {artifact}")
    if holds is None:
        holds = "result" if run.finished(artifact) else "inputs"
        if holds == "inputs" and run.config.partition.given:
            raise ConfigError(
                f"{run.url}/{artifact} isn't finished, and what it is trained from are its owner's rows",
                Give("inputs", "if these may leave, pack them"),
            )
    parts, sources = _read_parts(run, artifact, holds)
    records = files_of(parts, run.url)
    with write_archive(path) as archive:
        archive.add(CONTENTS, seal({"schema": SCHEMA, "artifact": artifact, "holds": holds}))
        archive.add(RUN_FILE, run.store.read(RUN_FILE))
        for part in parts:
            archive.add(part.key, part.data)
        for key, share in _shares(records):
            report(share, key)
            _add(archive, run, key, sources.get(key, key), records[key])
    return Packed(artifact, holds, len(records), _bytes(records), len(records))


def _read_parts(run: Run, artifact: Artifact, holds: Holds) -> tuple[list[ArchivePart], dict[str, str]]:
    """The artifacts of an archive, and the keys in the run of files that have another one in the archive."""
    if holds == "inputs":

        def read(each: Artifact) -> bytes:
            manifest = run.require(each)
            return manifest.to_json() if run.by_hand(each) else read_sealed(run.store, f"{each}/{NAME}")

        parts, partition = list(parts_below(run.inputs(artifact), read, run.url)), run.manifest(PARTITION)
        for part in parts:
            _require_listed(run, part, partition)
        return parts, {}
    manifest = run.finished(artifact) or run.require(artifact)
    brought = by_content(manifest)
    # Called the same but for the folder, so in the same order.
    names = zip(sorted(brought.files), sorted(manifest.files), strict=True)
    part = parse_part(artifact, brought.to_json(), run.url)
    return [part], {f"{artifact}/{new}": f"{artifact}/{old}" for new, old in names}


def _add(archive: ArchiveWriter, run: Run, key: str, source: str, record: FileRecord) -> None:
    try:
        intact = archive.add_fetched(key, record, partial(run.store.fetch, source))
    except FileNotFoundError:
        raise CorruptArtifact(f"{run.url}/{source}: gone, though its manifest lists it") from None
    if not intact:
        raise CorruptArtifact(f"{run.url}/{source}: cut short or altered, its manifest says otherwise")


def unpack(path: Path, url: str, report: Report = _silent) -> Packed:
    """Put what an archive holds into the run at `url`, which is made if there is none; once more is a no-op.

    Nothing is written before all of it has been verified, and nothing that is there is replaced. An artifact counts
    once its manifest is written, last. Raises ArchiveError for an archive that isn't as `pack` writes it, for other
    files in its place and for a second result; DriftError for one of another run; RunError, StorageError.
    """
    with read_archive(path) as archive, _naming(path):
        opened = _Opened(archive, url)
        opened.verify(lambda share, key: report(share / 2, f"verifying {key}"))
        missing = opened.missing()
        return opened.write(missing, lambda share, key: report((1 + share) / 2, f"writing {key}"))


class _Opened:
    """An archive at the run that it goes to."""

    def __init__(self, archive: ArchiveReader, url: str):
        """Read all but the files, and compare it with the run."""
        self._archive = archive
        self._artifact, self._holds = _read_contents(archive)
        self._sealed = archive.read(RUN_FILE, RUN_BYTES)
        with _as_refusal(archive, RUN_FILE):
            config = read_config(self._sealed, RUN_FILE)
            _require_sealed(unseal(self._sealed, RUN_FILE), self._sealed, RUN_FILE, indent=1)
        store = Store(url)
        self._exists = store.exists(RUN_FILE)
        self._run = Run.open(url) if self._exists else Run(store, config)
        # Not their bytes: another version writes others.
        packed, stored = (Identity(each.model_dump(mode="json")) for each in (config, self._run.config))
        if lines := drift(packed, stored):
            raise DriftError(f"{RUN_FILE}: {store.url} is another run: {lines[0]}")
        if self._artifact not in graph.trained_of(config):
            raise archive.refusal(CONTENTS, f"its run trains no {self._artifact}")
        left = MANIFEST_BYTES

        def read(artifact: Artifact) -> bytes:
            nonlocal left
            data = archive.read(f"{artifact}/{NAME}", left)
            left -= len(data)
            return data

        self._roots = (self._artifact,) if self._holds == "result" else self._run.inputs(self._artifact)
        self._parts = list(parts_below(self._roots, read, archive.path))
        self._records = files_of(self._parts, archive.path)
        self._offsets: dict[str, int] = {}
        self._require_identities()

    def _require_identities(self) -> None:
        partition = self._run.manifest(PARTITION)
        for part in self._parts:
            if lines := self._run.drift(part.artifact, part.manifest.identity):
                raise DriftError(f"{part.key}: was made otherwise than {self._run.url} wants it: {lines[0]}")
            if self._holds == "result" and by_content(part.manifest) != part.manifest:
                raise self._archive.refusal(part.key, f"names files elsewhere than in {BROUGHT} and their checksum")
            _require_listed(self._run, part, partition)

    def verify(self, report: Report) -> None:
        """Read all files and compare them with their manifests."""
        self._archive.require_length(self._records)
        for key, share in _shares(self._records):
            report(share, key)
            self._offsets[key] = self._archive.verify(key, self._records[key])
        self._archive.require_end()

    def missing(self) -> set[str]:
        """Keys of the files that the run doesn't have. Raises ArchiveError where it has others."""
        store = self._run.store
        for part in self._parts:
            existing = self._run.manifest(part.artifact)
            if existing is not None:
                self._require_same(part, existing)
                if self._holds == "result":
                    return set()  # also where it was packed, so that its files are elsewhere
        # Beside what came in archives an artifact has its attempts, any number of files.
        folders = [f"{root}/{BROUGHT}" if self._holds == "result" else root for root in self._roots]
        sizes = {f"{folder}/{name}": size for folder in folders for name, size in store.sizes(folder).items()}
        for key in self._records.keys() & sizes.keys():
            record = self._records[key]
            if sizes[key] != record.bytes or store.fetch(key, Path(os.devnull)) != record.sha256:
                raise ArchiveError(
                    f"{store.url}/{key}: is there already, with other bytes", "delete it, if it is spoilt"
                )
        return self._records.keys() - sizes.keys()

    def write(self, keys: set[str], report: Report) -> Packed:
        """Write these files, then the manifests, that of a partition after those that it names."""
        if not self._exists:
            Run.create(self._run.url, self._run.config, self._sealed)
        store = self._run.store
        for key, share in _shares(self._records):
            if key in keys:
                report(share, key)
                chunks = partial(self._archive.chunks, key, self._offsets[key], self._records[key])
                with as_storage_error(f"{store.url}/{key}"):
                    store.write_stream(key, chunks)
        for part in reversed(self._parts):
            if not store.create(part.key, part.data):
                existing = self._run.manifest(part.artifact)
                if existing is None:
                    raise StorageError(f"{store.url}/{part.key}: was there, and is gone: deleted meanwhile")
                self._require_same(part, existing)
            if self._holds == "inputs" and self._run.by_hand(part.artifact):
                self._run.accept(part.manifest)  # as it was where it was packed
        return Packed(self._artifact, self._holds, len(self._records), _bytes(self._records), len(keys))

    def _require_same(self, part: ArchivePart, existing: Manifest) -> None:
        if existing == part.manifest or (self._holds == "result" and by_content(existing) == part.manifest):
            return
        where = f"{self._run.url}/{part.key}"
        if self._holds == "result":
            fix = f"delete {where} first, if this one is to count"
            raise ArchiveError(f"{where}: another training has finished it already, and the first one counts", fix)
        raise ArchiveError(f"{where}: is there already, and another", "unpack into another folder")


def _read_contents(archive: ArchiveReader) -> tuple[Artifact, Holds]:
    data = archive.read(CONTENTS, CONTENTS_BYTES)
    with _as_refusal(archive, CONTENTS):
        body = unseal(data, CONTENTS, ["schema", "artifact", "holds"])
        _require_sealed(body, data, CONTENTS)
    if body["schema"] != SCHEMA:
        raise archive.refusal(CONTENTS, "was packed by a version of ddm-ray that this one can't read")
    holds: Holds | None = next((each for each in ("inputs", "result") if each == body["holds"]), None)
    try:
        artifact = Artifact(body["artifact"])
    except (ValueError, AttributeError, TypeError):
        artifact = None
    if artifact is None or holds is None:
        raise archive.refusal(CONTENTS, "doesn't say what the archive holds")
    return artifact, holds


def _require_sealed(body: dict[str, Any], data: bytes, name: str, indent: int | None = None) -> None:
    if seal(body, indent) != data:
        raise CorruptArtifact(f"{name}: altered since it was written")


def _require_listed(run: Run, part: ArchivePart, partition: Manifest | None) -> None:
    """Raise DriftError for a shard that isn't the partition's, if there is one: its rows are in others, too."""
    name = part.key.removeprefix(f"{PARTITION}/")
    if partition and name in partition.files and FileRecord.of(part.data) != partition.files[name]:
        raise DriftError(f"{part.key}: isn't the one that {run.url}/{PARTITION} lists")


@contextmanager
def _as_refusal(archive: ArchiveReader, name: str) -> Iterator[None]:
    """Have what can't be read of a member refused as the archive's."""
    try:
        yield
    except DDMError as error:
        raise archive.refusal(name, error.message.removeprefix(f"{name}: ")) from None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have errors begin with the archive's name, and be lines that tell a terminal nothing but letters."""
    try:
        yield
    except RecursionError:
        raise ArchiveError(f"{path}: a manifest is nested too deep", AGAIN) from None
    except DDMError as error:
        message = error.message if error.message.startswith(f"{path}: ") else f"{path}: {error.message}"
        error.message = printable(message, 900)
        raise


def _bytes(records: dict[str, FileRecord]) -> int:
    return sum(record.bytes for record in records.values())


def _shares(records: dict[str, FileRecord]) -> Iterator[tuple[str, float]]:
    """The files in their order, each with the share of all bytes that is before it."""
    total, done = max(_bytes(records), 1), 0
    for key, record in records.items():
        yield key, done / total
        done += record.bytes
