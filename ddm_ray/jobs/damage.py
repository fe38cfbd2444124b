"""Damage of finished artifacts: each file that isn't what its manifest says, of any kind and on any storage."""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ddm_ray.errors import CorruptArtifact
from ddm_ray.jobs.attempts import CURVE
from ddm_ray.jobs.job_files import list_jobs
from ddm_ray.run.chunk_records import PLAN, RECORDS, recorded_keys, stem_of_file
from ddm_ray.run.graph import Artifact
from ddm_ray.run.inventory import parts_of
from ddm_ray.run.listing import FOLDER, list_of, with_all_files
from ddm_ray.run.manifest import NAME, FileRecord, Manifest
from ddm_ray.run.run import Run
from ddm_ray.store.checksummed import read_sealed, sha256, unseal

REQUESTS = 8
_POINTER = re.compile(r"_[a-z]+/[A-Z]+\.json")
_NAMED_BY_POINTER = re.compile(r"_[a-z]+/[0-9a-f]{16}\.\w+")


@dataclass(frozen=True)
class Damage:
    """A file `name` of an artifact, or its manifest. `what` is wrong with it, as `gone or cut short`."""

    artifact: Artifact
    name: str
    what: str

    @property
    def only_charts(self) -> bool:
        """True if nothing but charts of a training needs the file."""
        return self.artifact.trains and self.name.rpartition("/")[2] == CURVE

    def error(self, run: Run, seen_from: Artifact | None = None) -> CorruptArtifact:
        """The error, with its remedy. `seen_from`: the artifact of the run that is named beside it."""
        key = f"{self.artifact}/{self.name}"
        holder = run.holder(key)
        where = key.removeprefix(f"{seen_from}/") if seen_from and holder is run else f"{holder.url}/{key}"
        return CorruptArtifact(f"{where}: {self.what}", holder.mend(self.artifact))


def damages(
    run: Run, manifest: Manifest, sizes: Mapping[str, int] | None = None, lists: bool = False, deep: bool = False
) -> Iterator[Damage]:
    """Damage of a finished artifact and of the artifacts that it lists, such as a partition's shards.

    Sizes are compared: `sizes` if the artifact's files are listed already. `lists`: also those of files in long lists.
    `deep`: every byte is read, too, and so are records that later commands read. Files that owners keep are left out.
    """
    yield from _of_files(run, manifest, sizes, lists or deep, deep)
    parts = parts_of(manifest)
    files = list_jobs(run.store, parts)  # one listing for hundreds of shards

    def look(part: Artifact) -> list[Damage]:
        return list(_of_part(run, part, parts[part], files[part].sizes, lists, deep))

    with ThreadPoolExecutor(REQUESTS) as pool:
        for each in pool.map(look, parts):
            yield from each


def _of_part(
    run: Run, part: Artifact, listed: FileRecord, sizes: Mapping[str, int], lists: bool, deep: bool
) -> Iterator[Damage]:
    """Damage of an artifact with this record of its manifest in another artifact's manifest."""
    try:
        manifest = run.manifest(part)
    except CorruptArtifact:
        yield Damage(part, NAME, "altered since it was written")
        return
    if manifest is None or sha256(manifest.to_json()) != listed.sha256:
        yield Damage(part, NAME, "another one than is listed" if manifest else "gone or cut short")
    else:
        yield from damages(run, manifest, sizes, lists, deep)


def _of_files(
    run: Run, manifest: Manifest, sizes: Mapping[str, int] | None, lists: bool, deep: bool
) -> Iterator[Damage]:
    artifact, listed = Artifact(manifest.artifact), list_of(manifest)
    if listed and not lists:  # a listing of a million files takes minutes
        here = {name: run.store.exists(f"{artifact}/{name}") for name in manifest.files}
        sizes = {name: record.bytes for name, record in manifest.files.items() if here[name]}
    elif sizes is None:
        sizes = run.store.sizes(artifact)
    if _is_away(run, artifact, listed, manifest, sizes):
        return
    if listed and lists:
        try:
            manifest = with_all_files(run, manifest)
        except CorruptArtifact:
            yield Damage(artifact, listed, "not the list that was written")
            return
    for name, record in manifest.files.items():
        if name.rpartition("/")[2] == NAME and name != NAME:
            continue  # a part's
        if sizes.get(name) != record.bytes:
            yield Damage(artifact, name, "gone or cut short")
        elif deep:
            try:
                run.check(manifest, name)
            except CorruptArtifact:
                yield Damage(artifact, name, "checksum differs")
    if deep and not artifact.trains:
        yield from _of_records(run, manifest, sizes)


def _is_away(run: Run, artifact: Artifact, listed: str | None, manifest: Manifest, sizes: Mapping[str, int]) -> bool:
    """True if the owner of these rows or this shard gave only their manifest."""
    owned = artifact.kind in ("rows", "shard") and artifact.cluster is not None and run.config.partition.given
    return owned and (listed not in sizes if listed else not sizes.keys() & manifest.files.keys())


def _of_records(run: Run, manifest: Manifest, sizes: Mapping[str, int]) -> Iterator[Damage]:
    """Damage of the plan and records of an artifact that was made chunk by chunk, and of files that these name."""
    artifact = Artifact(manifest.artifact)
    if PLAN in sizes:  # a copy has no records
        stems = {key.stem for key in recorded_keys(run.store, artifact)}
        for name in manifest.files:
            if (stem := stem_of_file(name)) is not None and stem not in stems:
                yield Damage(artifact, name, f"its record {RECORDS}/{stem} is gone")
    with_pointer = {FOLDER, *(name.partition("/")[0] for name in sizes if _POINTER.fullmatch(name))}
    for name in sizes:
        key = f"{artifact}/{name}"
        if _NAMED_BY_POINTER.fullmatch(name) and name.partition("/")[0] not in with_pointer:
            yield Damage(artifact, name, "the record that names it is gone")
        try:
            if name.startswith(f"{RECORDS}/"):
                unseal(read_sealed(run.store, key), key)
            elif _POINTER.fullmatch(name):
                fields = unseal(read_sealed(run.store, key), key, ["file", "file_record"])
                record, file = FileRecord(**fields["file_record"]), f"{name.rpartition('/')[0]}/{fields['file']}"
                run.check(Manifest(artifact, manifest.identity, {file: record}, {}), file)
        except (CorruptArtifact, FileNotFoundError, TypeError):
            yield Damage(artifact, name, "altered since it was written, or what it names is")
