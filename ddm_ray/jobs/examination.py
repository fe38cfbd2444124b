"""Examination of a run: whether its storage is reliable, and its artifacts are what their manifests say."""

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
    """An artifact that was examined, and what is wrong with it; None if it is sound."""

    artifact: Artifact
    error: DDMError | None


def examine(run: Run, deep: bool = False) -> Iterator[Finding]:
    """Findings on each artifact that is finished or damaged. They are yielded one by one, since large files take time.

    `deep`: read every byte of finished artifacts and compare checksums, not only sizes. Raises StorageError if nothing
    can be read.
    """
    for status in survey(run):
        if status.state == "damaged":
            yield Finding(status.artifact, status.error)
        elif status.state == "finished":
            yield Finding(status.artifact, _wrong_file(run, status.artifact, deep))


def broken_word(store: Store) -> str:
    """Words on what a run needs and the storage fails to do; empty if it works.

    A run needs conditional writes, and reads and listings that show the last write. The check writes a few bytes and
    deletes them.
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
        with suppress(StorageError):  # a few bytes left behind do no harm
            store.delete(folder)


def _wrong_file(run: Run, artifact: Artifact, deep: bool) -> CorruptArtifact | None:
    """An error for the first file of a finished artifact that differs from its manifest; files of owners are skipped.

    Without `deep` only sizes in long lists are compared, since a survey has compared the others.
    """
    manifest = run.finished(artifact)
    assert manifest
    listed = list_of(manifest)
    if not deep and listed is None:
        return None
    sizes = run.store.sizes(artifact)
    if listed is not None and listed not in sizes:
        return None  # the owner of these rows gave only their manifest
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
