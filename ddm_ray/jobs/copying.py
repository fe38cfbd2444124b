"""Copies of finished artifacts into another run's store. Each file is verified, and the manifest is written last."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ddm_ray.errors import ConfigError, CorruptArtifact, DriftError, MissingArtifact, StorageError
from ddm_ray.jobs.attempts import CLAIM, SavedState, saved_states
from ddm_ray.run.base import FILE, Base, digest_of_config, forget_derived, require_own_record
from ddm_ray.run.graph import PARTITION, Artifact, trained_of
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.inputs import beginning_of
from ddm_ray.run.inventory import inventory
from ddm_ray.run.listing import with_all_files
from ddm_ray.run.manifest import NAME, FileRecord, Identity, Manifest, drift
from ddm_ray.run.run import RUN_FILE, Run
from ddm_ray.spelling import shell_line
from ddm_ray.store.checksummed import canonical, read_sealed, sha256
from ddm_ray.store.store import Store

COPIED = "copied"
"""Folder for the weights of another store's attempt, if an attempt of the same number exists here."""
PART = 16 * 2**20
"""Bytes of a file that are in memory at a time."""
OF_GIVEN_SHARDS = frozenset({"beginning", "shard", "partition", "expert", "router", "replay"})
"""Kinds that leave their owner if owners give their shards. Only the manifest of a shard does: counts and checksums."""

Report = Callable[[float, str], None]
"""Called with the finished share, 0 to 1, and the file that comes next."""


@dataclass(frozen=True)
class Copied:
    """A copied artifact: the number and bytes of its files without the manifest, and how many were written."""

    artifact: Artifact
    files: int
    bytes: int
    written: int


@dataclass(frozen=True)
class _Part:
    """An artifact to copy: its manifest, also as bytes, and its own files by key."""

    manifest: Manifest
    data: bytes
    files: Mapping[str, FileRecord]

    @property
    def artifact(self) -> Artifact:
        return Artifact(self.manifest.artifact)


def copy(run: Run, url: str, artifact: Artifact | None, report: Report) -> list[Copied]:
    """Copy an artifact, or all finished artifacts, into the run at `url`, which is created if it doesn't exist.

    A partition is copied with all that its manifest names. Existing files are neither replaced nor written again, so
    that the same call continues an interrupted one. If owners give their shards, no row is copied. Raises ConfigError
    for an artifact that stays with its owner, MissingArtifact, CorruptArtifact for a file that differs from its
    manifest, DriftError if another run or another artifact is there, RunError and StorageError.
    """
    given = run.config.partition.given
    if artifact is not None and given and artifact.kind not in OF_GIVEN_SHARDS:
        raise ConfigError(f"{run.url}/{artifact} is made of its owner's rows, and stays where it is")
    parts: dict[Artifact, _Part] = {}
    for each in inventory(run) if artifact is None else [artifact]:
        if not given or each.kind in OF_GIVEN_SHARDS:
            _collect(run, each, parts)
    if artifact is not None and not parts:
        raise MissingArtifact(f"{run.url} has no finished {artifact} yet", run.make(artifact))
    if artifact is None and run.config.changes.of_clusters:
        run.require(PARTITION)  # what it is made from lies in the base, which a copy doesn't have
    store = Store(url)
    if not store.exists(RUN_FILE):  # to create a run needs more rights than to copy an artifact
        older = run.base is not None and not Store(run.url).exists(FILE)
        if run.kept:
            require_own_record(store, run.config)
            _note_kept(run, store, parts)
        Run.create(url, run.config, None if older else run.store.read(RUN_FILE))
    target = Run.open(url)
    if lines := drift(*(Identity(each.config.model_dump(mode="json")) for each in (run, target))):
        raise DriftError(f"{target.url} is another run: {lines[0]}")
    if run.kept and target.base is None and target.kept:
        _note_kept(run, store, parts)
        target = Run.open(url)
    return _copy_all(run, target, parts, report)


def copy_kept(run: Run, report: Report) -> None:
    """Copy all that a derived run keeps from its base into its own folder, and the states from which it continues.

    Only then its record says that it doesn't need the base. The same call continues an interrupted one. Raises as
    `copy`.
    """
    store, parts = Store(run.url), dict[Artifact, _Part]()
    record = Base.read(store)
    if run.base is None or record is None:
        return
    if run.config.partition.given:
        raise ConfigError(f"{run.url}: shards are given, so its owners' rows stay where they are and aren't copied")
    for artifact in run.kept:
        _collect(run, artifact, parts)
    _copy_all(run, Run(store, run.config, None, run.kept), parts, report)
    for job in trained_of(run.config):
        states = [state for before in run.predecessors(job) for state in _sound(before, job)]
        if states:
            _copy_state(run, store, job, *states[0])
    store.write(FILE, record.model_copy(update={"copied": True}).to_json())
    forget_derived(run.base.store, run.url)


def _sound(run: Run, job: Artifact) -> Iterator[tuple[Run, SavedState]]:
    return ((run, state) for state in saved_states(run.store, job) if isinstance(state, SavedState))


def _copy_state(run: Run, store: Store, job: Artifact, holder: Run, state: SavedState) -> None:
    """Copy a training state of a run's base, as a state of the run's own job. Its manifest is written last."""
    for name, record in state.manifest.files.items():
        key = f"{state.prefix}/{name}"
        store.write_stream(key, partial(_verified, holder.store, key, record))
    claim = f"{state.prefix.rpartition('/state/')[0]}/{CLAIM}"
    store.create(claim, holder.store.read(claim))
    manifest = replace(state.manifest, identity=run.identity(job))
    store.create(f"{state.prefix}/{NAME}", manifest.to_write(f"{run.url}/{state.prefix}/{NAME}"))


def _note_kept(run: Run, target: Store, parts: Mapping[Artifact, _Part]) -> None:
    """Record in the copy of a derived run which artifacts are known by their digests: they follow from the base."""
    before = Base.read(target)
    kept = {str(each): part.manifest.digest for each, part in parts.items() if not each.trains or each in run.kept}
    url, known = run.base.url if run.base else run.url, before.kept if before else {}
    own = Base.read(Store(run.url))
    configuration = own.configuration if own else digest_of_config(run.config)
    record = Base(url=url, configuration=configuration, kept={**known, **kept}, copied=True)
    if record != before:
        target.write(FILE, record.to_json())


def _copy_all(run: Run, target: Run, parts: Mapping[Artifact, _Part], report: Report) -> list[Copied]:
    total, done, copied = max(1, sum(_bytes(part) for part in parts.values())), 0, list[Copied]()

    def tell(sent: float, key: str) -> None:
        report((done + sent) / total, key)

    for part in parts.values():
        copied.append(_copy(run, target, part, tell))
        done += _bytes(part)
    return copied


def _collect(run: Run, artifact: Artifact, parts: dict[Artifact, _Part], listed: FileRecord | None = None) -> None:
    """Add a finished artifact to `parts`, after the artifacts that it lists. `listed`: its record in such a list."""
    where = f"{run.url}/{artifact}/{NAME}"
    manifest = run.finished(artifact, accepted=True) or run.finished(artifact)
    if manifest is None:
        if listed is not None:
            raise CorruptArtifact(f"{where}: gone, though another artifact's manifest lists it")
        return
    data = manifest.to_json() if run.by_hand(artifact) else read_sealed(run.store, f"{artifact}/{NAME}")
    if listed is not None and FileRecord.of(data) != listed:
        raise CorruptArtifact(f"{where}: isn't the one that another artifact's manifest lists")
    files: dict[str, FileRecord] = {}
    for name, record in {**manifest.files, **with_all_files(run, manifest).files}.items():
        folder, _, last = name.rpartition("/")
        if last != NAME:
            files[f"{artifact}/{name}"] = record
            continue
        try:
            below = Artifact(f"{artifact}/{folder}")
        except ValueError:
            raise CorruptArtifact(f"{where}: lists {name}, which is no artifact's") from None
        _collect(run, below, parts, record)
    for needed in beginning_of(run.config, artifact)[:1] if artifact.trains and run.config.expert.adapter else ():
        if needed not in parts:  # the base, without which an adapter is of no use
            _collect(run, needed, parts)
    stays = artifact.kind == "shard" and run.config.partition.given
    parts[artifact] = _Part(manifest, data, {} if stays else files)


def _copy(run: Run, target: Run, part: _Part, report: Report) -> Copied:
    artifact, where = part.artifact, f"{target.url}/{part.artifact}"
    if artifact not in target.kept and (lines := target.drift(artifact, part.manifest.identity)):
        raise DriftError(f"{run.url}/{artifact} was made otherwise than {target.url} wants it: {lines[0]}")
    sources, existing = list(part.files), target.manifest(artifact)
    if artifact.trains:
        apart, attempt = _apart(part), "/".join(TrainedInfo.of(part.manifest).weights.split("/")[:2])
        if existing == apart.manifest or (not existing and target.store.exists(f"{artifact}/{attempt}/{CLAIM}")):
            part = apart
    if existing is not None:
        if existing != part.manifest:
            raise DriftError(
                f"{where}: another one is there already, and the first one counts", f"delete {shell_line(where)} first"
            )
        return Copied(artifact, len(part.files), _bytes(part), 0)
    missing, sent = _missing(target.store, part), 0
    for from_key, (key, record) in zip(sources, part.files.items(), strict=True):
        report(sent, key)
        if key in missing:
            target.store.write_stream(key, partial(_verified, run.store, from_key, record))
        sent += record.bytes
    if not target.store.create(f"{artifact}/{NAME}", part.data) and target.manifest(artifact) != part.manifest:
        raise StorageError(f"{where}/{NAME}: another one was written meanwhile", passes=False)
    return Copied(artifact, len(part.files), _bytes(part), len(missing))


def _missing(store: Store, part: _Part) -> set[str]:
    """Keys of the part's files that a store lacks. Raises CorruptArtifact if it has a file with other bytes."""
    sizes = {f"{part.artifact}/{name}": size for name, size in store.sizes(part.artifact).items()}
    for key in part.files.keys() & sizes.keys():
        record = part.files[key]
        if sizes[key] != record.bytes or store.fetch(key, Path(os.devnull)) != record.sha256:
            raise CorruptArtifact(
                f"{store.url}/{key}: is there already, with other bytes", "delete it, if it is spoilt"
            )
    return part.files.keys() - sizes.keys()


def _verified(store: Store, key: str, record: FileRecord) -> Iterator[bytes]:
    """A file's bytes. The last ones are yielded only after the whole file is verified. Raises CorruptArtifact."""
    digest = hashlib.sha256()
    for start in range(0, record.bytes, PART):
        part = range(start, min(start + PART, record.bytes))
        try:
            [data] = store.read_parts(key, [part])
        except FileNotFoundError:
            raise CorruptArtifact(f"{store.url}/{key}: gone, though its manifest lists it") from None
        digest.update(data)
        if len(data) < len(part) or (part.stop == record.bytes and digest.hexdigest() != record.sha256):
            raise CorruptArtifact(f"{store.url}/{key}: cut short or altered, its manifest says otherwise")
        yield data


def _apart(part: _Part) -> _Part:
    """The same weights, in the same order, in a folder that is named by their checksums, so that a repetition agrees.

    Raises CorruptArtifact for files outside the folder of weights.
    """
    manifest, folder = part.manifest, f"{TrainedInfo.of(part.manifest).weights}/"
    if strays := [name for name in manifest.files if not name.startswith(folder)]:
        raise CorruptArtifact(f"{manifest.artifact}/{NAME}: lists {strays[0]}, which isn't of its weights")
    records = {name.removeprefix(folder): record for name, record in manifest.files.items()}
    digest = sha256(canonical({name: record.sha256 for name, record in records.items()}))[:16]
    files = {f"{COPIED}/{digest}/{name}": record for name, record in records.items()}
    moved = replace(manifest, files=files, info={**manifest.info, "weights": f"{COPIED}/{digest}"})
    return _Part(moved, moved.to_json(), {f"{manifest.artifact}/{name}": record for name, record in files.items()})


def _bytes(part: _Part) -> int:
    return sum(record.bytes for record in part.files.values())
