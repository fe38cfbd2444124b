"""Run: a directory or prefix that holds one training of one mixture, with the layout of `graph.py`."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from ddm_ray.config import RunConfig
from ddm_ray.errors import CorruptArtifact, DDMError, DriftError, MissingArtifact, RunError, StorageError
from ddm_ray.remedies import Accept, Begin, Fix, Give, Make, Mend
from ddm_ray.run import graph
from ddm_ray.run.base import RUN_FILE, require_own_record
from ddm_ray.run.graph import Artifact
from ddm_ray.run.identity import completed, fields_of, is_longer
from ddm_ray.run.info import Info, RowsInfo
from ddm_ray.run.inheriting import InheritingStore
from ddm_ray.run.inputs import based_on, committed_by_stage, first_missing, inputs, several_missing
from ddm_ray.run.link import link, read_config
from ddm_ray.run.manifest import NAME, SCHEMA, FileRecord, Identity, Manifest, drift, read_manifest, read_verified
from ddm_ray.store.checksummed import RECORD_BYTES, seal
from ddm_ray.store.refusals import refusal
from ddm_ray.store.retries import SHORT_RETRIES, RetryPolicy
from ddm_ray.store.store import Store

ACCEPTED = "accepted"
"""Folder with copies of the accepted manifests. Islands may read it but not write to it."""


class Run:
    """A run on storage: its immutable configuration, and its artifacts with their manifests.

    `base`: the run that this one was derived from, unless it was copied, or None. `kept`: digests of the artifacts that
    are the base's, too (see `base.py`).
    """

    def __init__(
        self,
        store: Store,
        config: RunConfig,
        base: "Run | None" = None,
        kept: Mapping[Artifact, str] | None = None,
    ):
        self.store, self.url = store, store.url
        self.config, self.base, self.kept = config, base, kept or {}

    @classmethod
    def create(
        cls,
        url: str,
        config: RunConfig,
        run_file: bytes | None = None,
        on_replaced: Callable[[str], None] | None = None,
    ) -> "Run":
        """Write run.json if it is absent. The same configuration again is a no-op; another one raises DriftError.

        With `on_replaced`, another configuration replaces that of a run that has nothing but its run.json;
        `on_replaced` is called with the fields that differ. `run_file`: the bytes of another run.json from which the
        configuration was read. Raises RunError if nothing can be written there, and StorageError for an object store
        that doesn't answer or has no conditional writes.
        """
        store = Store(url)
        fields = config.model_dump(mode="json")
        data = run_file or seal({"schema": SCHEMA, "config": fields}, indent=1)
        try:
            store.require_create()
            require_own_record(store, config)
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
                stored["data"]["source"] = source  # older versions stored relative paths
            lines = drift(Identity(fields), Identity(stored))
            if lines and on_replaced and not store.sizes("").keys() - {RUN_FILE}:
                store.write(RUN_FILE, data)
                on_replaced(_short(lines))
            elif lines:
                raise DriftError(f"{store.url} is another run: {_short(lines)}; choose another folder for this one")
        return cls(store, config)

    @classmethod
    def open(cls, url: str, retry_policy: RetryPolicy = SHORT_RETRIES) -> "Run":
        """Open the run at a path or URI. `retry_policy`: that of its store.

        Raises RunError if there is no run, CorruptArtifact if its run.json was altered, and StorageError.
        """
        store = Store(url, retry_policy)
        where = f"{store.url}/{RUN_FILE}"
        try:
            data = store.read(RUN_FILE, RECORD_BYTES, cut=False)
        except FileNotFoundError:
            raise RunError(f"{url} is not a run: it has no {RUN_FILE}", Begin(url)) from None
        except (StorageError, ValueError) as error:
            if isinstance(error, StorageError) and (store.local is None or store.local.is_dir()):
                raise  # there may be a run, which can't be read now
            raise RunError(f"{url} is not a run that can be read: {refusal(error)}") from None
        linked = link(store, *read_config(data, where), retry_policy, ACCEPTED, cls.open)
        return cls(linked.store, linked.config, linked.base, linked.kept)

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the hash over the configuration. Runs with the same fingerprint are the same."""
        return Identity(self.config.model_dump(mode="json")).fingerprint

    @property
    def named(self) -> RunConfig:
        """The configuration with names of classes, for display.

        If it has only a number of classes, the names are those of the source, once rows have been prepared.
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
        """The source's note on the owner of the images; None if the rows have no such note."""
        return rows.credit if (rows := self._rows) else None

    @property
    def _rows(self) -> RowsInfo | None:
        """The record of the rows; None if they aren't finished or can't be read."""
        with suppress(CorruptArtifact, StorageError):
            if manifest := self.manifest(graph.ROWS):
                return RowsInfo.of(manifest)
        return None

    @cached_property  # loops over hundreds of experts ask for it at each
    def experts(self) -> tuple[Artifact, ...]:
        """All expert artifacts, by cluster."""
        return graph.experts_of(self.config)

    def identity(self, artifact: Artifact, unread: tuple[type[DDMError], ...] = ()) -> Identity:
        """The identity that the artifact would have now. Inputs that aren't here (another site's) are left out.

        So are inputs with manifests that can't be read because of an error of the kinds `unread`.
        """
        digests = {}
        for name in self.inputs(artifact):
            with suppress(*unread):
                if manifest := self.manifest(name, accepted=True):
                    digests[str(name)] = manifest.digest
        for name in based_on(self.config, artifact) if self.base else ():
            assert self.base
            with suppress(*unread):
                if manifest := self.base.manifest(name):
                    digests[f"base/{name}"] = manifest.digest
        return Identity(fields_of(self.config, artifact), digests)

    def inputs(self, artifact: Artifact) -> tuple[Artifact, ...]:
        """The artifacts that an artifact is made from."""
        return inputs(self.config, artifact)

    def by_hand(self, artifact: Artifact) -> bool:
        """True if others use the artifact only after a person has accepted it: what islands make from rows."""
        made_by_islands = artifact.stage in ("train", "replay") and artifact not in self.kept
        return made_by_islands and self.config.acceptance == "by_hand"

    def manifest(self, artifact: Artifact, accepted: bool = False) -> Manifest | None:
        """The artifact's manifest; None if it isn't finished. Raises CorruptArtifact, also for another's manifest.

        `accepted`: for artifacts that are accepted by hand, the accepted manifest, or None if there is none.
        """
        place = f"{ACCEPTED}/{artifact}" if accepted and self.by_hand(artifact) else artifact
        try:
            manifest = read_manifest(self.store, place, self.mend(artifact) if place == artifact else None)
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
        """The artifact's manifest; None if it isn't finished. Raises DriftError if it was made otherwise.

        `accepted`: see `manifest`. Inputs that can't be read because of an error of the kinds `unread` aren't compared.
        """
        manifest = self.manifest(artifact, accepted)
        if manifest and artifact in self.kept:
            if manifest.digest != self.kept[artifact]:
                raise DriftError(
                    f"{self.url}/{artifact} is another one than the run was derived with: {manifest.digest}, not"
                    f" {self.kept[artifact]}; bring that back, or derive a run again"
                )
            return manifest
        if manifest and (lines := self.drift(artifact, manifest.identity, self.identity(artifact, unread))):
            raise DriftError(f"{self.url}/{artifact} was made otherwise: {_short(lines)}", self.remake(artifact))
        return manifest

    def drift(self, artifact: Artifact, made: Identity, expected: Identity | None = None) -> list[str]:
        """A line for each difference between the identity with which an artifact was `made` and the `expected` one.

        The default is today's identity. A field that an older version didn't have counts as its default.
        """
        spelled = Identity(completed(self.config, artifact, made.fields), made.inputs)
        return drift(expected or self.identity(artifact), spelled)

    def require(self, artifact: Artifact) -> Manifest:
        """The manifest of a finished artifact; the accepted one, for artifacts that are accepted by hand.

        Raises DriftError and MissingArtifact.
        """
        manifest = self.finished(artifact, accepted=True)
        if manifest is None and self.by_hand(artifact) and self.finished(artifact):
            fix = Accept(self.url, artifact)
            raise MissingArtifact(f"{self.url}/{artifact} is finished, but not accepted yet", fix)
        if manifest is None:
            raise MissingArtifact(f"{self.url} has no finished {artifact} yet", self.make(artifact, with_others=True))
        return manifest

    def read(self, artifact: Artifact, name: str, manifest: Manifest | None = None) -> bytes:
        """Read and verify one file of a finished artifact. Raises CorruptArtifact if it is gone or altered."""
        manifest = manifest or self.require(artifact)
        where = f"{self.url}/{artifact}/{name}"
        if name not in manifest.files:
            raise CorruptArtifact(f"{where}: its manifest doesn't list it", self.mend(artifact))
        try:
            return read_verified(self.store, f"{artifact}/{name}", manifest.files[name])
        except FileNotFoundError:
            raise CorruptArtifact(f"{where}: gone, though its manifest lists it", self.mend(artifact)) from None
        except CorruptArtifact as error:
            error.fix = self.mend(artifact)
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
            raise CorruptArtifact(f"{where}: gone, though its manifest lists it", self.mend(artifact)) from None
        if digest != manifest.files[name].sha256:
            raise CorruptArtifact(f"{where}: checksum differs from its manifest's", self.mend(artifact))

    def accept(self, manifest: Manifest, replace: bool = False) -> None:
        """Accept a manifest of an artifact that an island made. `replace`: also if another one was accepted before.

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

    def make(self, artifact: Artifact, with_others: bool = False) -> Fix:
        """The remedy for a missing artifact: it, or the first missing one of those that it is made from.

        `with_others`: if that is a model that a mixture needs, and others are missing, too, all of them.
        """
        first = first_missing(self.config, artifact, self._lacks)
        if (holder := self.holder(first)) is not self:
            return holder.make(first)
        if first != artifact and self.by_hand(first) and self.manifest(first):
            return Accept(self.url, first)
        others = with_others and several_missing(self.config, first, self._lacks)
        made, asked = committed_by_stage(self.config, first), committed_by_stage(self.config, artifact)
        return Make(self.url, made, first=made != asked, with_others=others)

    def _lacks(self, artifact: Artifact) -> bool:
        """True if an artifact isn't there, or isn't accepted. One that can't be read has a message of its own."""
        with suppress(CorruptArtifact, StorageError):
            return self.manifest(artifact, accepted=True) is None
        return False

    def mend(self, artifact: Artifact) -> Mend:
        """The remedy for a damaged artifact. Its training states, or its source, may be sound."""
        return Mend(self.holder(artifact).url, artifact)

    def remake(self, artifact: Artifact, delete: str | None = None) -> Make:
        """The remedy for what was made otherwise: delete it, or its file at the URL `delete`, and make it again."""
        holder = self.holder(artifact)
        return Make(holder.url, committed_by_stage(holder.config, artifact), delete or f"{holder.url}/{artifact}")

    def predecessors(self, artifact: Artifact) -> tuple["Run", ...]:
        """The runs before this one, nearest first, that may have a state from which its training job continues.

        Empty if the job isn't the same but for its number of steps, or has other inputs there.
        """
        if self.base is None or self.inherits(artifact) or not is_longer(self.base.config, self.config, artifact):
            return ()
        before = self.base.identity(artifact).inputs
        if any(before.get(name) != digest for name, digest in self.identity(artifact).inputs.items()):
            return ()
        return (self.base, *self.base.predecessors(artifact))

    def holder(self, key: str) -> "Run":
        """The run that has an object: this one, or one that it was derived from."""
        return self.base.holder(key) if self.base and self.inherits(key) else self

    def inherits(self, key: str) -> bool:
        """True if the key lies in the run that this one was derived from."""
        return isinstance(self.store, InheritingStore) and self.store.inherits(key)

    def commit_records(
        self,
        artifact: Artifact,
        records: dict[str, FileRecord],
        info: Info,
        content: str | None = None,
        identity: Identity | None = None,
    ) -> Manifest:
        """Commit an artifact by its manifest, after its files are written. `records`: the files as they should be.

        `identity`: that of the stage's start, by default the current one. `content`: see Manifest. If a rival committed
        first, the rival's manifest counts and is returned. Raises DataError for a manifest that could not be read.
        """
        manifest = Manifest(artifact, identity or self.identity(artifact), records, info.as_json(), content)
        if self.store.create(f"{artifact}/{NAME}", manifest.to_write(f"{self.url}/{artifact}/{NAME}")):
            return manifest
        if (committed := self.finished(artifact)) is None:
            raise StorageError(f"{self.url}/{artifact}/{NAME}: was there, and is gone: deleted meanwhile")
        return committed


def _short(lines: list[str], most: int = 4) -> str:
    return "; ".join(lines[:most]) + (f" and {len(lines) - most} more" if len(lines) > most else "")
