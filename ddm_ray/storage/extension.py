"""Extensions: a run that trains for more steps than another one, from where that one is.

An extension of RUN is a run of its own in RUN/extended/0001 (0002, ...): it has a run.json with more steps, and FILE.
Rows, partition, and what was finished and isn't extended, lie in RUN alone and are read there. A training goes on from
the newest state that RUN has of it, as an attempt does from an earlier one's, to the bit, and publishes in its own run.
Nothing in RUN is written: what is finished there stays as it was, and whoever works on RUN never meets the other.
"""

import re
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from ddm_ray.config import RunConfig
from ddm_ray.config.longer import Part
from ddm_ray.errors import CorruptArtifact
from ddm_ray.storage.graph import REFERENCES, Artifact, artifacts, inputs, targets
from ddm_ray.storage.identity import fields_of
from ddm_ray.storage.sealed import seal, unseal
from ddm_ray.storage.store import Store

EXTENDED, FILE = "extended", "extends.json"
"""Folder of a run's extensions, and the record in each that makes it one."""
SCHEMA, FILE_BYTES, MOST = 1, 2**16, 9999
SHARED = ("beginnings", "rows", "partition")
"""Folders that every extension inherits; of others those whose artifacts are finished."""
_PLACE = re.compile(rf"(?P<base>.+)/{EXTENDED}/[0-9]{{4}}")


class Extension(BaseModel):
    """The record of an extension: the steps of each part that trains for more, and the folders that lie in its base."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    number: Annotated[int, Field(alias="schema")] = SCHEMA
    steps: dict[Part, PositiveInt] = Field(min_length=1)
    inherits: tuple[Annotated[str, Field(pattern="^[a-z]{1,20}$")], ...] = Field(max_length=20)

    @classmethod
    def read(cls, store: Store) -> Self | None:
        """The record of the run in this store; None if it is no extension. Raises CorruptArtifact."""
        if base_url(store.url) is None:
            return None
        where = f"{store.url}/{FILE}"
        try:
            body = unseal(store.read(FILE, FILE_BYTES, cut=False), where, ["schema", "steps", "inherits"])
        except FileNotFoundError:
            return None
        try:
            record = cls.model_validate(body)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, problem["loc"]))
            raise CorruptArtifact(f"{where}: not the record of an extension, {field}: {problem['msg']}") from None
        if record.number != SCHEMA:
            raise CorruptArtifact(f"{where}: schema {record.number}, this version of ddm-ray reads {SCHEMA}")
        return record

    def to_json(self) -> bytes:
        """The record as it is stored."""
        return seal(self.model_dump(mode="json", by_alias=True), indent=1)


def base_url(url: str) -> str | None:
    """The run that a run in this place would extend; None if no extension lies there."""
    match = _PLACE.fullmatch(url)
    return match["base"] if match else None


def untouched(before: RunConfig, after: RunConfig) -> set[str]:
    """Folders of artifacts that are the same under both configurations; evaluations are always new."""
    changed = set[Artifact]()
    same = {*SHARED, REFERENCES}
    every = [*artifacts(after), *map(targets, range(after.partition.num_clusters))]
    for artifact in every:
        differs = fields_of(before, artifact) != fields_of(after, artifact)
        if differs or any(each in changed for each in inputs(after, artifact)):
            changed.add(artifact)
        else:
            same.add(folder_of(artifact))
    return same - {folder_of(artifact) for artifact in changed}


def folder_of(artifact: Artifact) -> str:
    """The folder of a run that an artifact lies in, with all of its kind."""
    return artifact.partition("/")[0]
