"""Extensions: a run that continues another run, for more steps or with more rows.

An extension of RUN is a run of its own in RUN/extended/0001 (0002, ...). It has a run.json with more steps, and FILE.
Rows, partition, and finished artifacts that aren't extended stay in RUN and are read there. A training job continues
from its newest state in RUN, with the same bits as if it had never ended, and publishes in the extension. Nothing in
RUN is written, so that work on RUN is not affected.

An extension that `appends` files has rows of these files only, and shards of its own. Each shard lists the files of
RUN's shard, which are read in RUN, and then the new files. Its training jobs begin with copies of RUN's weights and not
with RUN's states, since those belong to another order of rows.
"""

import re
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from ddm_ray.config import RunConfig
from ddm_ray.config.longer import Part, continued, lengthened
from ddm_ray.errors import CorruptArtifact
from ddm_ray.run.graph import REFERENCES, Artifact
from ddm_ray.run.identity import fields_of
from ddm_ray.run.inputs import artifacts, inputs
from ddm_ray.store.checksummed import seal, unseal
from ddm_ray.store.store import Store

EXTENDED, FILE = "extended", "extends.json"
"""Folder of a run's extensions, and the name of the record in each extension."""
SCHEMA, FILE_BYTES, MAX_EXTENSIONS = 1, 2**16, 9999
SHARED = ("beginnings", "rows", "partition")
"""Folders that every extension inherits. It inherits other folders if their artifacts are finished."""
_LATER = "appended"
_SHARD_FILE = re.compile(
    rf"partition/shards/[^/]+/(train|heldout)-({_LATER}(?P<generation>[0-9]{{3}})-)?[0-9]+\.parquet"
)
_PLACE = re.compile(rf"(?P<base>.+)/{EXTENDED}/[0-9]{{4}}")


class Appended(BaseModel):
    """Files that an extension adds to those of its base: their source, their number, and a digest of their list."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    source: str = Field(min_length=1, max_length=4096)
    files: PositiveInt
    listing: str = Field(pattern="^[0-9a-f]{64}$")


class Extension(BaseModel):
    """The record of an extension: the steps of each part that trains longer, and the folders that lie in its base.

    `appends`: files that it adds, or None if it only trains for more steps.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    number: Annotated[int, Field(alias="schema")] = SCHEMA
    steps: dict[Part, PositiveInt]
    inherits: tuple[Annotated[str, Field(pattern="^[a-z]{1,20}$")], ...] = Field(max_length=20)
    appends: Appended | None = None

    @model_validator(mode="after")
    def _is_more(self) -> Self:
        if not self.steps and self.appends is None:
            raise ValueError("it is of no more steps, and of no more rows")
        return self

    @classmethod
    def read(cls, store: Store) -> Self | None:
        """The record of the run in this store; None if the run isn't an extension. Raises CorruptArtifact."""
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
            field = ".".join(map(str, problem["loc"])) or "steps"
            raise CorruptArtifact(f"{where}: not the record of an extension, {field}: {problem['msg']}") from None
        if record.number != SCHEMA:
            raise CorruptArtifact(f"{where}: schema {record.number}, this version of ddm-ray reads {SCHEMA}")
        return record

    def configure(self, base: RunConfig, url: str, source: str | None = None) -> RunConfig:
        """The configuration of the extension of the run at `url`. `source`: where its files are now.

        Raises ConfigError.
        """
        if self.appends is None:
            return lengthened(base, self.steps)
        return continued(base, self.steps, url, source or self.appends.source)

    def to_json(self) -> bytes:
        """The record as it is stored."""
        return seal(self.model_dump(mode="json", by_alias=True, exclude_none=True), indent=1)


def shard_file(split: str, number: int, generation: int) -> str:
    """Name of a shard's file of one split. It sorts after the files of earlier generations of appended rows."""
    return f"{split}-{f'{_LATER}{generation:03d}-' if generation else ''}{number:05d}.parquet"


def generation_of(key: str) -> int | None:
    """Count of appends before a shard's file was made; None for keys of other objects."""
    match = _SHARD_FILE.fullmatch(key)
    return int(match["generation"] or 0) if match else None


def base_url(url: str) -> str | None:
    """URL of the run that a run at this URL extends; None if the URL isn't an extension's."""
    match = _PLACE.fullmatch(url)
    return match["base"] if match else None


def untouched(before: RunConfig, after: RunConfig) -> set[str]:
    """Folders of artifacts that are the same under both configurations. Evaluations are always new."""
    changed = set[Artifact]()
    same = {*SHARED, REFERENCES}
    for artifact in artifacts(after):
        differs = fields_of(before, artifact) != fields_of(after, artifact)
        if differs or any(each in changed for each in inputs(after, artifact)):
            changed.add(artifact)
        else:
            same.add(folder_of(artifact))
    return same - {folder_of(artifact) for artifact in changed}


def folder_of(artifact: Artifact) -> str:
    """The folder in a run that has all artifacts of this artifact's kind."""
    return artifact.partition("/")[0]
