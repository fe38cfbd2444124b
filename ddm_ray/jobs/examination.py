"""Examination of a run: whether its storage is reliable, and its artifacts are what their manifests say."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from ddm_ray.errors import CorruptArtifact, DDMError, DriftError, MissingArtifact, StorageError
from ddm_ray.jobs.attempts import STATE, WEIGHTS, folders_of
from ddm_ray.jobs.damage import Damage, damages
from ddm_ray.jobs.status import survey
from ddm_ray.remedies import Mend
from ddm_ray.run.graph import KINDS, Artifact
from ddm_ray.run.info import TrainedInfo
from ddm_ray.run.inventory import optional
from ddm_ray.run.manifest import NAME, read_manifest
from ddm_ray.run.run import RUN_FILE, Run
from ddm_ray.spelling import shell_line
from ddm_ray.store.store import Store

BYTES = b"what was written first"


@dataclass(frozen=True)
class Finding:
    """An artifact that was examined, and what is wrong with it; None if it is sound.

    `names`: its damaged files, if that is what is wrong. `only_charts`: nothing but charts of a training needs them.
    """

    artifact: Artifact
    error: DDMError | None = None
    names: tuple[str, ...] = ()
    only_charts: bool = False


def examine(run: Run, deep: bool = False) -> Iterator[Finding]:
    """Findings on each artifact that is finished or damaged, one for each artifact that it lists and that is damaged.

    They are yielded one by one, since large files take time. `deep`: read every byte that a later command reads, also
    of training states, and compare checksums, not only sizes. Raises StorageError if nothing can be read.
    """
    for status in survey(run):
        if status.state in ("finished", "damaged"):
            yield from _readable(run, status.artifact, deep, status.error)
        if deep and status.artifact.trains and not run.inherits(status.artifact):
            yield from _of_attempts(run, status.artifact)
    for kind, row in KINDS.items():
        for artifact in optional(run, kind) if not row.surveyed else ():
            yield from _readable(run, artifact, deep)


def _readable(run: Run, artifact: Artifact, deep: bool, error: DDMError | None = None) -> Iterator[Finding]:
    """Findings on one artifact; that storage refuses it is one, if other objects can be read."""
    try:
        yield from examine_one(run, artifact, deep, error)
    except StorageError as refused:
        run.store.exists(RUN_FILE)  # raises if nothing can be read
        yield Finding(artifact, refused)


def examine_one(run: Run, artifact: Artifact, deep: bool, error: DDMError | None = None) -> Iterator[Finding]:
    """Findings on one artifact; none if it isn't finished. `error`: what is known to be wrong with it."""
    try:
        if (manifest := run.manifest(artifact)) is None:
            return
    except CorruptArtifact as unreadable:
        # Another artifact's has no such remedy: its folder may lie in the wrong place.
        yield Finding(artifact, unreadable, (NAME,) if isinstance(unreadable.fix, Mend) else ())
        return
    every: dict[Artifact, list[Damage]] = {}
    for damage in damages(run, manifest, lists=True, deep=deep) if not isinstance(error, DriftError) else ():
        every.setdefault(damage.artifact, []).append(damage)
    for part, wrong in every.items():
        wrong.sort(key=lambda each: each.only_charts)
        first = wrong[0].error(run, part)
        first.message += f", and {len(wrong) - 1} more of its files" if wrong[1:] else ""
        yield Finding(part, first, tuple(each.name for each in wrong), wrong[0].only_charts)
    if not every:
        yield Finding(artifact, error)


def errors_of(run: Run, artifact: Artifact, deep: bool) -> list[DDMError]:
    """Errors of an artifact, also that it isn't finished; empty if it is sound."""
    findings = list(examine_one(run, artifact, deep))
    return [each.error for each in findings if each.error] if findings else [MissingArtifact("is still to be made")]


def _of_attempts(run: Run, artifact: Artifact) -> Iterator[Finding]:
    """A finding for each damaged state of a training job, and for damaged weights from before its end.

    It has no `names`: the artifact itself doesn't need them.
    """
    own = ""  # the folder of the artifact's own weights, which are examined with it
    with suppress(CorruptArtifact):
        if manifest := run.manifest(artifact):
            own = TrainedInfo.of(manifest).weights
    users = {
        STATE: "just a derived run needs it" if own else "no attempt goes on from it",
        WEIGHTS: "it isn't used",
    }
    for kind, user in users.items():
        for number, name in folders_of(run.store, artifact, kind, unnamed=False):
            folder = f"attempts/{number:04d}/{kind}/{name}"
            key = f"{artifact}/{folder}/{NAME}"
            if folder == own or not run.store.exists(key):
                continue
            wrong = altered_file(run.store, f"{artifact}/{folder}")
            if wrong and run.store.exists(key):  # a newer attempt may have deleted it while it was read
                fix = f"delete {shell_line(f'{run.url}/{artifact}/{folder}')}"
                yield Finding(artifact, CorruptArtifact(f"{folder}/{wrong}: gone or altered; {user}", fix))


def altered_file(store: Store, prefix: str) -> str | None:
    """Name of the first file of a state, or of weights, that isn't as their manifest says; None if all are."""
    try:
        manifest = read_manifest(store, prefix)
    except (CorruptArtifact, FileNotFoundError):
        return NAME
    for name, record in manifest.files.items():
        try:
            if store.fetch(f"{prefix}/{name}", Path(os.devnull)) != record.sha256:
                return name
        except FileNotFoundError:
            return name
    return None


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
