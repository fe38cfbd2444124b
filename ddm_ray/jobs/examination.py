"""Examination of a run: whether its storage keeps its word, and its artifacts are what their manifests say."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

from ddm_ray.errors import CorruptArtifact, DDMError, StorageError
from ddm_ray.jobs.status import survey
from ddm_ray.run.graph import Artifact
from ddm_ray.run.listing import list_of, with_all_files
from ddm_ray.run.run import Run
from ddm_ray.store.store import Store

BYTES = b"what was written first"


@dataclass(frozen=True)
class Finding:
    """An artifact that was looked at, and what is wrong with it; None where it is sound."""

    artifact: Artifact
    error: DDMError | None


def examine(run: Run, deep: bool = False) -> Iterator[Finding]:
    """Findings on each artifact that is finished or damaged; one by one, since files take a while.

    `deep`: every byte of finished artifacts is read and compared with its checksum, not sizes alone. Raises
    StorageError where nothing can be read.
    """
    for status in survey(run):
        if status.state == "damaged":
            yield Finding(status.artifact, status.error)
        elif status.state == "finished":
            yield Finding(status.artifact, _wrong_file(run, status.artifact, deep))


def broken_word(store: Store) -> str:
    """Words on what a run rests on, and the storage doesn't do: to create only once, and to show what was written.

    Writes a few bytes, and deletes them.
    """
    folder = f"_probe-{uuid4().hex}"
    key = f"{folder}/object"
    try:
        if not store.create(key, BYTES):
            return "it says that a new object exists already"
        if store.create(key, b"a rival's"):
            return (
                "it creates an object twice (it ignores If-None-Match), so two owners of a job would spoil it; choose"
                " one that knows conditional writes, as S3, GCS, Azure, R2 and new versions of MinIO do"
            )
        if store.read(key) != BYTES:
            return "it answers other bytes than were written"
        if store.sizes(folder) != {"object": len(BYTES)}:
            return "its listings lack what was written"
        store.delete(folder)
        return "it shows what was deleted" if store.exists(key) else ""
    except FileNotFoundError:
        return "it doesn't find what was written"
    except StorageError as error:
        return f"{error.message}; have this machine reach it, by a key that may read and write there"
    finally:
        with suppress(StorageError):  # nobody minds a few bytes
            store.delete(folder)


def _wrong_file(run: Run, artifact: Artifact, deep: bool) -> CorruptArtifact | None:
    """A file of a finished artifact that isn't what its manifest says, as an error; files of owners aren't here.

    By sizes alone unless `deep`: a survey has compared these but for files that a manifest names by a list.
    """
    manifest = run.finished(artifact)
    assert manifest
    listed = list_of(manifest)
    if not deep and listed is None:
        return None
    sizes = run.store.sizes(artifact)
    if listed is not None and listed not in sizes:
        return None  # an owner's rows, who gave their manifest alone
    try:
        manifest = with_all_files(run, manifest)
        for name, record in manifest.files.items():
            if listed is not None and sizes.get(name) != record.bytes:
                return CorruptArtifact(f"{name} is gone or cut short", run.remake(artifact))
            if deep and name in sizes:
                run.check(manifest, name)
    except CorruptArtifact as error:
        return error
    return None
