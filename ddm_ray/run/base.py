"""The record of the run that a run was derived from: where it is, and which of its artifacts are this run's, too.

A derived run has a run.json of its own and FILE. The artifacts that it keeps are read in the base, and known by their
digests: an artifact of other content is refused. A training job that it continues begins with the base's newest state.
Nothing of that is written in the base but a note with the new run's URL, by which garbage collection there knows what
is still needed. A copied run has all that it keeps in its own folder, and doesn't need the base.
"""

import os
import re
from contextlib import suppress
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddm_ray.config import RunConfig
from ddm_ray.errors import CorruptArtifact, DriftError, StorageError
from ddm_ray.run.graph import Artifact
from ddm_ray.spelling import shell_line
from ddm_ray.store.checksummed import RECORD_BYTES, canonical, seal, sha256, unseal
from ddm_ray.store.store import Store, is_local

RUN_FILE = "run.json"
FILE = "base.json"
"""Name of the record in a derived run."""
NOTES = "derived"
"""Folder with a note for each run that was derived from a run."""
EXTENDED = "extended"
"""Folder of the runs that older versions derived from a run."""
NOTE_BYTES = 2**16
SCHEMA = 1


class Base(BaseModel):
    """The base of a run: its URL, the digests of the artifacts that are `kept`, and whether these were `copied`.

    `configuration`: digest of the configuration with which the run was derived, so that no other one has the artifacts.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    number: Annotated[int, Field(alias="schema")] = SCHEMA
    url: str = Field(min_length=1, max_length=4096)
    configuration: str = Field(pattern="^[0-9a-f]{16}$")
    kept: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{16}$")]]
    copied: bool = False

    @classmethod
    def read(cls, store: Store) -> Self | None:
        """The record of the run in this store; None if the run isn't a derived one. Raises CorruptArtifact."""
        where = f"{store.url}/{FILE}"
        try:
            body = unseal(store.read(FILE, RECORD_BYTES, cut=False), where, ["schema", "url", "configuration", "kept"])
        except FileNotFoundError:
            return None
        try:
            record = cls.model_validate(body)
            kept = {Artifact(path): digest for path, digest in record.kept.items()}
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, problem["loc"]))
            raise CorruptArtifact(f"{where}: not the record of a base, {field:.200}: {problem['msg']}") from None
        except ValueError as error:
            raise CorruptArtifact(f"{where}: not the record of a base, kept: {error}") from None
        if record.number != SCHEMA:
            raise CorruptArtifact(f"{where}: schema {record.number}, this version of ddm-ray reads {SCHEMA}")
        return record.model_copy(update={"kept": kept})

    def to_json(self) -> bytes:
        """The record as it is stored."""
        return seal(self.model_dump(mode="json", by_alias=True), indent=1)


def digest_of_config(config: RunConfig | dict[str, Any]) -> str:
    """16 hex digits of the hash over a configuration, or over its fields as a run.json has them."""
    fields = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
    return sha256(canonical(fields))[:16]


def require_own_record(store: Store, config: RunConfig) -> None:
    """Raise DriftError if a run of another configuration was being derived in this store."""
    record = Base.read(store)
    if record and record.configuration != digest_of_config(config) and not store.exists(RUN_FILE):
        raise DriftError(
            f"{store.url}: another run was being derived here, from {record.url}; choose another folder, or delete"
            f" {shell_line(f'{store.url}/{FILE}')}"
        )


def holder_of(key: str) -> str:
    """The path of the artifact that a key belongs to, as deep as there is one; empty for keys of no artifact."""
    parts = key.split("/")
    for length in range(len(parts), 0, -1):
        with suppress(ValueError):
            return Artifact("/".join(parts[:length]))
    return ""


def relative_url(url: str, of: str) -> str:
    """The URL of a base as it is recorded in the run at `of`: relative if both are on one disk.

    So they may be moved together.
    """
    if is_local(url) and is_local(of):
        return os.path.relpath(url, of)
    return url


def absolute_url(url: str, of: str) -> str:
    """The inverse of `relative_url`."""
    return os.path.normpath(os.path.join(of, url)) if is_local(url) and is_local(of) else url


def note_derived(base: Store, url: str) -> bool:
    """Write the URL of a derived run into its base; returns False if that can't be written."""
    try:
        base.write(_note_of(base, url), seal({"schema": SCHEMA, "url": relative_url(url, base.url)}))
    except StorageError:
        return False
    return True


def forget_derived(base: Store, url: str) -> None:
    """Delete the note of a derived run that doesn't need its base any more."""
    with suppress(StorageError):
        base.delete_one(_note_of(base, url))


def _note_of(base: Store, url: str) -> str:
    return f"{NOTES}/{sha256(relative_url(url, base.url).encode())[:16]}.json"


def derived_from(store: Store) -> list[str]:
    """URLs of the runs that were derived from the run in this store, by its notes. One that can't be read is none."""
    urls = [f"{store.url}/{EXTENDED}/{name}" for name in store.folders(EXTENDED)]
    for name in store.sizes(NOTES):
        if not re.fullmatch(r"[0-9a-f]{16}\.json", name):
            continue
        key = f"{NOTES}/{name}"
        with suppress(CorruptArtifact, FileNotFoundError):
            body = unseal(store.read(key, NOTE_BYTES, cut=False), f"{store.url}/{key}", ["schema", "url"])
            if isinstance(body["url"], str):
                urls.append(absolute_url(body["url"], store.url))
    return sorted(urls)
