"""The link of a derived run to its base, as a run is opened; also that of extensions, which older versions made.

An extension of RUN lies in RUN/extended/0001 (0002, ...). Its record, OLDER, names the folders of RUN that it has, too.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from ddm_ray.config import RunConfig, parse_config
from ddm_ray.config.changes import Appended, Changes
from ddm_ray.errors import CorruptArtifact, DriftError, RunError
from ddm_ray.run.base import FILE, Base, absolute_url, digest_of_config
from ddm_ray.run.graph import Artifact
from ddm_ray.run.inheriting import InheritingStore
from ddm_ray.run.manifest import SCHEMA
from ddm_ray.spelling import printable
from ddm_ray.store.checksummed import unseal
from ddm_ray.store.retries import RetryPolicy
from ddm_ray.store.store import Store

if TYPE_CHECKING:
    from ddm_ray.run.run import Run

OLDER = "extends.json"
_OLDER_BYTES = 2**16
_PLACE = re.compile(r"(?P<base>.+)/extended/[0-9]{4}")
OpenRun = Callable[[str, RetryPolicy], "Run"]
_FOLDERS, _APPENDED = TypeAdapter(list[str]), TypeAdapter(Appended | None)


@dataclass(frozen=True)
class Link:
    """A run's store and configuration; if it is a derived run, its base, and the digests of the artifacts it keeps."""

    store: Store
    config: RunConfig
    base: "Run | None" = None
    kept: dict[Artifact, str] | None = None


def read_config(data: bytes, where: str) -> tuple[RunConfig, Any]:
    """The configuration in the run.json at `where`, also as it is there. CorruptArtifact, RunError or ConfigError."""
    body = unseal(data, where, ["schema", "config"], fix="restore it, or begin a new run elsewhere")
    if (schema := body["schema"]) != SCHEMA:
        reads = f"this version of ddm-ray reads {SCHEMA}; use the version that wrote it"
        raise RunError(f"{where}: schema {printable(schema, 20)}, {reads}")
    return parse_config(body["config"], where), body["config"]


def link(
    store: Store, config: RunConfig, fields: Any, retry_policy: RetryPolicy, accepted: str, open_run: "OpenRun"
) -> Link:
    """Link the run in a store to its base. `accepted`: folder with copies of manifests of artifacts.

    `fields`: the configuration as run.json has it. Raises CorruptArtifact for an altered record, or one of another
    configuration; RunError if the base isn't there, and as `open_run`.
    """
    record = Base.read(store)
    if record is None:
        older = _older(store, config, lambda url: open_run(url, retry_policy))
        if older is None:
            return Link(store, config)
        base, kept, config = older
    else:
        if record.configuration != digest_of_config(fields):
            where = f"{store.url}/{FILE}"
            raise CorruptArtifact(f"{where}: is of another configuration than run.json", "derive the run elsewhere")
        kept = {Artifact(path): digest for path, digest in record.kept.items()}
        if record.copied:
            return Link(store, config, None, kept)
        url = absolute_url(record.url, store.url)
        try:
            base = open_run(url, retry_policy)
        except RunError as error:
            if error.fix is None:  # one that this one was derived from is the one that is gone
                raise
            raise RunError(
                f"{store.url}: the run that it was derived from isn't at {url} ({error.message}); bring it back, or"
                " derive this run again, by the same options, from where it is now"
            ) from None
    generation = config.changes.generation if config.changes.appended else 0
    inheriting = InheritingStore(store.url, base.store, kept, accepted, retry_policy, generation)
    return Link(inheriting, config, base, kept)


def _older(
    store: Store, config: RunConfig, open_run: Callable[[str], "Run"]
) -> tuple["Run", dict[Artifact, str], RunConfig] | None:
    """The base of an extension that an older version made, what it keeps, and its configuration with its changes."""
    place = _PLACE.fullmatch(store.url)
    if place is None:
        return None
    where = f"{store.url}/{OLDER}"
    try:
        body = unseal(store.read(OLDER, _OLDER_BYTES, cut=False), where, ["schema", "steps", "inherits"])
    except FileNotFoundError:
        return None
    try:
        folders, appended = _FOLDERS.validate_python(body["inherits"]), _APPENDED.validate_python(body.get("appends"))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        raise CorruptArtifact(f"{where}: not the record of an extension: {problem['msg']}") from None
    base = open_run(place["base"])
    kept = {}
    for artifact in _artifacts(base):
        if artifact.partition("/")[0] in folders and (digest := _digest(base, artifact)):
            kept[artifact] = digest
    changes = Changes(appended=appended, generation=base.config.changes.generation + (appended is not None))
    return base, kept, config.model_copy(update={"changes": changes})


def _artifacts(base: "Run") -> list[Artifact]:
    from ddm_ray.run.inventory import every_artifact, optional  # which import Run

    return every_artifact(base.config, optional(base, "reference"))


def _digest(base: "Run", artifact: Artifact) -> str | None:
    try:
        manifest = base.finished(artifact, accepted=True)
    except (CorruptArtifact, DriftError):
        return None
    return manifest.digest if manifest else None
