"""Run: a directory or prefix that holds one training of one mixture, laid out as `graph.py` says."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ddm_ray.config import RunConfig, parse_config
from ddm_ray.errors import CorruptArtifact, DDMError, DriftError, MissingArtifact, RunError, StorageError
from ddm_ray.remedies import Accept, Begin, Give, Make
from ddm_ray.run import graph
from ddm_ray.run.extension import Appended, Extension, base_url
from ddm_ray.run.graph import Artifact
from ddm_ray.run.identity import completed, fields_of
from ddm_ray.run.info import Info, RowsInfo
from ddm_ray.run.inheriting import InheritingStore
from ddm_ray.run.manifest import NAME, SCHEMA, FileRecord, Identity, Manifest, drift, read_manifest, read_verified
from ddm_ray.spelling import printable
from ddm_ray.store.checksummed import RECORD_BYTES, seal, unseal
from ddm_ray.store.refusals import refusal
from ddm_ray.store.retries import SHORT_RETRIES, RetryPolicy
from ddm_ray.store.store import Store

RUN_FILE = "run.json"
ACCEPTED = "accepted"
"""Folder of copies of the manifests that were accepted, which islands may read and not write."""


class Run:
    """A run on storage: its immutable configuration, and its artifacts with their manifests.

    One that trains on where another one is has that as its `base`, else None, and `appends` files, or has the same
    rows: None (see `extension.py`).
    """

    def __init__(self, store: Store, config: RunConfig, base: "Run | None" = None, appends: Appended | None = None):
        self.store = store
        self.config = config
        self.url = store.url
        self.base = base
        self.appends = appends

    @classmethod
    def create(
        cls,
        url: str,
        config: RunConfig,
        sealed: bytes | None = None,
        on_replaced: Callable[[str], None] | None = None,
    ) -> "Run":
        """Write run.json if it is absent. The same configuration again is a no-op, another raises DriftError.

        With `on_replaced` another one takes the place of that of a run of which nothing else exists yet, and that is
        called with the fields that differ. `sealed`: the bytes of run.json elsewhere, of which the
        configuration was read. Raises RunError where nothing can be written, StorageError for an object store that
        doesn't answer, or that can't be relied on to create things only once.
        """
        store = Store(url)
        fields = config.model_dump(mode="json")
        data = sealed or seal({"schema": SCHEMA, "config": fields}, indent=1)
        try:
            store.require_create()
            created = store.create(RUN_FILE, data)
        except FileNotFoundError:
            raise RunError(f"{store.url}: there is no such bucket; create it, or choose another") from None
        except (StorageError, ValueError) as error:
            if isinstance(error, StorageError) and store.local is None:
                raise
            raise RunError(f"{store.url}: no run can be made here: {refusal(error)}; choose another folder") from None
        if not created:
            existing = cls.open(url)
            stored = existing.config.model_dump(mode="json")
            source = fields["data"]["source"]
            if os.path.abspath(os.path.expanduser(stored["data"]["source"])) == source:
                stored["data"]["source"] = source  # runs were begun with relative ones
            lines = drift(Identity(fields), Identity(stored))
            if lines and on_replaced and not store.sizes("").keys() - {RUN_FILE}:
                store.write(RUN_FILE, data)
                on_replaced(_short(lines))
            elif lines:
                raise DriftError(f"{store.url} is another run: {_short(lines)}; choose another folder for this one")
        return cls(store, config)

    @classmethod
    def open(cls, url: str, retry_policy: RetryPolicy = SHORT_RETRIES) -> "Run":
        """The run at a path or URI. Raises RunError if there is none, CorruptArtifact if it was altered, StorageError.

        `retry_policy` is its store's.
        """
        store = Store(url, retry_policy)
        where = f"{store.url}/{RUN_FILE}"
        try:
            data = store.read(RUN_FILE, RECORD_BYTES, cut=False)
        except FileNotFoundError:
            raise RunError(f"{url} is not a run: it has no {RUN_FILE}", Begin(url)) from None
        except (StorageError, ValueError) as error:
            if isinstance(error, StorageError) and (store.local is None or store.local.is_dir()):
                raise  # it may be one, though not for now
            raise RunError(f"{url} is not a run that can be read: {refusal(error)}") from None
        config = read_config(data, where)
        if (extension := Extension.read(store)) is None:
            return cls(store, config)
        base = cls.open(base_url(store.url) or "", retry_policy)
        first = config.expert.train.init_from
        longer = extension.configure(base.config, first.source if first else base.url, config.data.source)
        if lines := drift(Identity(longer.model_dump(mode="json")), Identity(config.model_dump(mode="json"))):
            raise DriftError(f"{store.url} isn't an extension of the run at {base.url}: {_short(lines)}")
        generation = base.generation + 1 if extension.appends else 0
        inheriting = InheritingStore(url, base.store, extension.inherits, ACCEPTED, retry_policy, generation)
        return cls(inheriting, config, base, extension.appends)

    @property
    def generation(self) -> int:
        """The number of times that rows have been appended, to this run or to one that it extends."""
        return (self.base.generation if self.base else 0) + (self.appends is not None)

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the hash over the configuration: two who see the same one have the same run."""
        return Identity(self.config.model_dump(mode="json")).fingerprint

    @property
    def named(self) -> RunConfig:
        """The configuration for whoever shows classes to people: those that it only counts have their source's names.

        That is once rows are made of a source that has some.
        """
        data = self.config.data
        rows = self._rows if data.classes_are_counted else None
        names = (rows.classes or ()) if rows else ()
        if not 0 < len(names) <= len(data.class_names):
            return self.config
        named = data.model_copy(update={"class_names": names + data.class_names[len(names) :]})
        return self.config.model_copy(update={"data": named})

    @property
    def credit(self) -> str | None:
        """Words on whose the pictures are, as the rows have them of their source; None: it asks for none."""
        rows = self._rows
        return rows.credit if rows else None

    @property
    def _rows(self) -> RowsInfo | None:
        """The record of the rows; None where they aren't made, or can't be read."""
        with suppress(CorruptArtifact, StorageError):
            if manifest := self.manifest(graph.ROWS):
                return RowsInfo.of(manifest)
        return None

    @property
    def experts(self) -> tuple[Artifact, ...]:
        """All expert artifacts, by cluster."""
        return graph.experts_of(self.config)

    def evaluations(self) -> list[Artifact]:
        """Artifacts of all evaluations that are begun, by name; a folder that can't be one's is passed over."""
        names = self.store.folders(graph.EVALUATIONS)
        return [graph.evaluation(name) for name in names if re.fullmatch(graph.NAME_PATTERN, name)]

    def identity(self, artifact: Artifact, unread: tuple[type[DDMError], ...] = ()) -> Identity:
        """Identity to make the artifact under now; inputs that aren't here (another site's) are left out.

        Likewise those whose manifests can't be read for an error of the kinds `unread`.
        """
        digests = {}
        for name in self.inputs(artifact):
            with suppress(*unread):
                if manifest := self.manifest(name, accepted=True):
                    digests[str(name)] = manifest.digest
        if self.appends and self.base and artifact.stage in ("prepare", "partition"):
            earlier = graph.ROWS if artifact.stage == "prepare" else graph.PARTITION
            with suppress(*unread):
                if manifest := self.base.manifest(earlier):
                    digests[f"base/{earlier}"] = manifest.digest
        return Identity(fields_of(self.config, artifact), digests)

    def inputs(self, artifact: Artifact) -> tuple[Artifact, ...]:
        """The artifacts that an artifact is made from."""
        return graph.inputs(self.config, artifact)

    def by_hand(self, artifact: Artifact) -> bool:
        """True for what counts once somebody has accepted it, for all but who makes it: what islands make of rows."""
        return artifact.stage in ("train", "replay") and self.config.acceptance == "by_hand"

    def manifest(self, artifact: Artifact, accepted: bool = False) -> Manifest | None:
        """The artifact's manifest, or None if it isn't finished. Raises CorruptArtifact, also for another's.

        `accepted`: as it was accepted, None if it wasn't, of what is accepted by hand.
        """
        place = f"{ACCEPTED}/{artifact}" if accepted and self.by_hand(artifact) else artifact
        try:
            manifest = read_manifest(self.store, place)
        except FileNotFoundError:
            return None
        if manifest.artifact != artifact:
            raise CorruptArtifact(
                f"{self.url}/{place}/{NAME}: is that of {manifest.artifact}; put the right folder there"
            )
        artifact.info.of(manifest)
        return manifest

    def finished(
        self, artifact: Artifact, accepted: bool = False, unread: tuple[type[DDMError], ...] = ()
    ) -> Manifest | None:
        """The manifest if the artifact is finished as this run wants it. Raises DriftError if otherwise.

        `accepted`: see `manifest`. Inputs that can't be read for an error of the kinds `unread` aren't compared.
        """
        manifest = self.manifest(artifact, accepted)
        if manifest and (lines := self.drift(artifact, manifest.identity, self.identity(artifact, unread))):
            raise DriftError(f"{self.url}/{artifact} was made otherwise: {_short(lines)}", self.remake(artifact))
        return manifest

    def drift(self, artifact: Artifact, made: Identity, expected: Identity | None = None) -> list[str]:
        """A line for each difference between the identity that an artifact was made under and the `expected` one.

        The expected one is today's unless given. A field that an older version didn't have counts as its default.
        """
        spelled = Identity(completed(self.config, artifact, made.fields), made.inputs)
        return drift(expected or self.identity(artifact), spelled)

    def require(self, artifact: Artifact) -> Manifest:
        """The manifest of a finished artifact, of what is accepted by hand the accepted one.

        Raises DriftError, MissingArtifact.
        """
        manifest = self.finished(artifact, accepted=True)
        if manifest is None and self.by_hand(artifact) and self.finished(artifact):
            fix = Accept(self.url, artifact)
            raise MissingArtifact(f"{self.url}/{artifact} is finished, and nobody has accepted it yet", fix)
        if manifest is None:
            raise MissingArtifact(f"{self.url} has no finished {artifact} yet", self.make(artifact))
        return manifest

    def read(self, artifact: Artifact, name: str, manifest: Manifest | None = None) -> bytes:
        """One verified file of a finished artifact. Raises CorruptArtifact if it is gone or altered."""
        manifest = manifest or self.require(artifact)
        where = f"{self.url}/{artifact}/{name}"
        if name not in manifest.files:
            raise CorruptArtifact(f"{where}: its manifest doesn't list it", self.remake(artifact))
        try:
            return read_verified(self.store, f"{artifact}/{name}", manifest.files[name])
        except FileNotFoundError:
            raise CorruptArtifact(f"{where}: gone, though its manifest lists it", self.remake(artifact)) from None
        except CorruptArtifact as error:
            error.fix = self.remake(artifact)
            raise

    def check(self, manifest: Manifest, name: str) -> None:
        """Compare one file of an artifact with its manifest, a few MiB of it in memory at a time.

        Raises CorruptArtifact if it is gone or altered.
        """
        artifact = Artifact(manifest.artifact)
        where = f"{self.url}/{artifact}/{name}"
        try:
            digest = self.store.fetch(f"{artifact}/{name}", Path(os.devnull))
        except FileNotFoundError:
            raise CorruptArtifact(f"{where}: gone, though its manifest lists it", self.remake(artifact)) from None
        if digest != manifest.files[name].sha256:
            raise CorruptArtifact(f"{where}: checksum differs from its manifest's", self.remake(artifact))

    def accept(self, manifest: Manifest, replace: bool = False) -> None:
        """Have the manifest of what an island made count from now on; `replace`: also in place of another one.

        Raises DriftError if another one was accepted.
        """
        artifact = Artifact(manifest.artifact)
        key = f"{ACCEPTED}/{artifact}/{NAME}"
        data = manifest.to_write(f"{self.url}/{key}")
        if replace:
            self.store.write(key, data)
        elif not self.store.create(key, data):
            before = self.manifest(artifact, accepted=True)
            if before is None or before.digest != manifest.digest:
                was = f"another one was accepted before ({before.digest if before else 'since deleted'})"
                fix = Give("replace", "if this one is to count, accept it")
                raise DriftError(f"{self.url}/{artifact} is {manifest.digest}, and {was}", fix)

    def make(self, artifact: Artifact) -> Make:
        """The remedy for an artifact that isn't there."""
        return Make(self.url, graph.committed_by_stage(self.config, artifact))

    def remake(self, artifact: Artifact, delete: str | None = None) -> Make:
        """The remedy for a damaged artifact: delete it, or one file of it at the URL `delete`, and make it again."""
        if self.base and self.inherits(artifact):
            return self.base.remake(artifact, delete)
        return replace(self.make(artifact), delete=delete or f"{self.url}/{artifact}")

    def predecessors(self, artifact: Artifact) -> tuple["Run", ...]:
        """The runs, nearest first, from whose states of a training job this run's goes on: others that it extends.

        None where the job has other inputs there, as a student whose teachers were trained for longer, or other rows.
        """
        if self.base is None or self.appends or self.inherits(artifact):
            return ()
        before = self.base.identity(artifact).inputs
        if any(before.get(name) != digest for name, digest in self.identity(artifact).inputs.items()):
            return ()
        return (self.base, *self.base.predecessors(artifact))

    def inherits(self, key: str) -> bool:
        """True for what lies in the run that this one extends."""
        return isinstance(self.store, InheritingStore) and self.store.inherits(key)

    def commit_records(
        self,
        artifact: Artifact,
        records: dict[str, FileRecord],
        info: Info,
        content: str | None = None,
        identity: Identity | None = None,
    ) -> Manifest:
        """Create the artifact's manifest, last, of files that are written; `records` are what was meant to be there.

        `identity` is that of the stage's start, if not now's; `content`: see Manifest. Where a rival committed first,
        theirs counts and is returned. Raises DataError for a manifest that could not be read.
        """
        manifest = Manifest(artifact, identity or self.identity(artifact), records, info.as_json(), content)
        if self.store.create(f"{artifact}/{NAME}", manifest.to_write(f"{self.url}/{artifact}/{NAME}")):
            return manifest
        committed = self.finished(artifact)
        if committed is None:
            raise StorageError(f"{self.url}/{artifact}/{NAME}: was there, and is gone: deleted meanwhile")
        return committed


def read_config(data: bytes, where: str) -> RunConfig:
    """The configuration of a run.json, which is at `where`. Raises CorruptArtifact, RunError, ConfigError."""
    body = unseal(data, where, ["schema", "config"], fix="restore it, or begin a new run elsewhere")
    if body["schema"] != SCHEMA:
        raise RunError(f"{where}: schema {printable(body['schema'], 20)}, this version of ddm-ray reads {SCHEMA}")
    return parse_config(body["config"], where)


def _short(lines: list[str], most: int = 4) -> str:
    return "; ".join(lines[:most]) + (f" and {len(lines) - most} more" if len(lines) > most else "")
