"""Run: a directory or prefix that holds one training of one mixture. The only file that knows its layout."""

import json
from typing import Any

from ddm_ray.config import RunConfig, parse_config
from ddm_ray.errors import CorruptArtifact, DriftError, MissingArtifact, RunError
from ddm_ray.storage.manifest import (
    NAME,
    SCHEMA,
    FileRecord,
    Identity,
    Manifest,
    canonical,
    drift,
    sha256,
    verify,
)
from ddm_ray.storage.store import Store, StoreFailure, reason

RUN_FILE = "run.json"
ROWS = "rows"
PARTITION = "partition"
CENTROIDS = "partition/centroids"
ROUTER = "router"
MONOLITH = "monolith"
EVALUATIONS = "eval"


def owner_rows(cluster: int) -> str:
    """Artifact of the rows of one owner, where shards are given: never in one place with another's."""
    return f"{ROWS}/cluster={cluster:03d}"


def shard(cluster: int) -> str:
    """Artifact of one cluster's rows as its expert trains on them."""
    return f"{PARTITION}/shards/cluster={cluster:03d}"


def expert(cluster: int) -> str:
    """Artifact of one cluster's expert."""
    return f"experts/{cluster:03d}"


def evaluation(name: str) -> str:
    """Artifact of one evaluation."""
    return f"{EVALUATIONS}/{name}"


class Run:
    """A run on storage: its immutable configuration, and its artifacts with their manifests."""

    def __init__(self, store: Store, config: RunConfig):
        self.store = store
        self.config = config
        self.url = store.url

    @classmethod
    def create(cls, url: str, config: RunConfig) -> "Run":
        """Write run.json if it is absent. The same configuration again is a no-op, another raises DriftError.

        Raises RunError where nothing can be written.
        """
        store = Store(url)
        fields = config.model_dump(mode="json")
        body = {"schema": SCHEMA, "config": fields}
        data = json.dumps({**body, "checksum": sha256(canonical(body))}, indent=1).encode() + b"\n"
        try:
            created = store.create(RUN_FILE, data)
        except StoreFailure as error:
            raise RunError(f"{store.url}: no run can be made here: {reason(error)}; choose another folder") from None
        if not created:
            there = cls.open(url)
            found, wanted = Identity(there.config.model_dump(mode="json")), Identity(fields)
            if lines := drift(wanted, found):
                raise DriftError(f"{store.url} is another run: {_short(lines)}; choose another folder for this one")
        return cls(store, config)

    @classmethod
    def open(cls, url: str) -> "Run":
        """The run at a path or URI. Raises RunError if there is none, CorruptArtifact if it was altered."""
        store = Store(url)
        where = f"{store.url}/{RUN_FILE}"
        try:
            data = store.read(RUN_FILE)
        except FileNotFoundError:
            make = f"make one with: ddm init {url} --recipe NAME"
            raise RunError(f"{url} is not a run: it has no {RUN_FILE}; {make}") from None
        except StoreFailure as error:
            raise RunError(f"{url} is not a run that can be read: {reason(error)}") from None
        try:
            body = json.loads(data)
            checksum, schema, config = body.pop("checksum"), body["schema"], body["config"]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CorruptArtifact(f"{where}: not a whole run file; restore it, or begin a new run elsewhere") from None
        if checksum != sha256(canonical(body)):
            raise CorruptArtifact(f"{where}: altered since the run began; restore it, or begin a new run elsewhere")
        if schema != SCHEMA:
            raise RunError(f"{where}: schema {schema}, this version of ddm-ray reads {SCHEMA}")
        return cls(store, parse_config(config, where))

    @property
    def rows(self) -> list[str]:
        """The artifacts of rows: one, or one an owner where shards are given."""
        if self.config.partition.method != "given":
            return [ROWS]
        return [owner_rows(cluster) for cluster in range(self.config.partition.num_clusters)]

    @property
    def experts(self) -> list[str]:
        """All expert artifacts, by cluster."""
        return [expert(cluster) for cluster in range(self.config.partition.num_clusters)]

    def identity(self, artifact: str) -> Identity:
        """What the artifact should be made under now; inputs that aren't here (another site's) left out."""
        fields, inputs = self._reads(artifact)
        manifests = {name: self.manifest(name) for name in inputs}
        return Identity(fields, {name: found.digest for name, found in manifests.items() if found})

    def inputs(self, artifact: str) -> list[str]:
        """The artifacts that an artifact is made from."""
        return self._reads(artifact)[1]

    def _reads(self, artifact: str) -> tuple[dict[str, Any], list[str]]:
        config = self.config.model_dump(mode="json")
        kind = artifact.split("/")[0]
        data = {"data": config["data"]}
        given = self.config.partition.method == "given"
        if kind == ROWS:
            return (data if given else data | {"embedder": config["embedder"]}), []
        if kind == PARTITION and given:
            # All that owners share is their shards' manifests, and these are files of the partition.
            rows = [] if artifact == PARTITION else [owner_rows(int(artifact.rpartition("=")[2]))]
            return {"partition": config["partition"]}, rows
        if kind == PARTITION:
            return {"partition": config["partition"]}, [ROWS]
        trained = data | {"flow": config["flow"], "num_clusters": config["partition"]["num_clusters"]}
        denoiser = trained | {"expert": config["expert"]}
        if kind == "experts":
            return denoiser, [shard(int(artifact.split("/")[1]))]
        if kind == MONOLITH:
            return denoiser, [PARTITION]
        if kind == ROUTER:
            return trained | {"router": config["router"]}, [PARTITION]
        assert kind == EVALUATIONS, artifact
        return {"evaluate": config["evaluate"], "sample": config["sample"]}, [*self.experts, ROUTER, MONOLITH]

    def strategy(self) -> str:
        """How to sample: the configured strategy; none: what the run's own evaluation found best, `once` until then.

        Any finished evaluation will do: they differ in name alone. One of other experts, or one that can't be read,
        doesn't count.
        """
        if self.config.sample.strategy is not None:
            return self.config.sample.strategy
        for name in sorted(self.store.folders(EVALUATIONS)):
            try:
                found = self.manifest(evaluation(name))
            except CorruptArtifact:
                continue  # `status` tells of it; models don't depend on a report
            if found and not drift(self.identity(evaluation(name)), found.identity):
                return found.info["best_strategy"]
        return "once"

    def manifest(self, artifact: str) -> Manifest | None:
        """The artifact's manifest, or None if it isn't finished. Raises CorruptArtifact, also for another's."""
        key = f"{artifact}/{NAME}"
        try:
            data = self.store.read(key)
        except FileNotFoundError:
            return None
        manifest = Manifest.from_json(data, f"{self.url}/{key}")
        if manifest.artifact != artifact:
            raise CorruptArtifact(f"{self.url}/{key}: is that of {manifest.artifact}; put the right folder there")
        return manifest

    def finished(self, artifact: str) -> Manifest | None:
        """The manifest if the artifact is finished as this run wants it. Raises DriftError if otherwise."""
        manifest = self.manifest(artifact)
        if manifest and (lines := drift(self.identity(artifact), manifest.identity)):
            raise DriftError(f"{self.url}/{artifact} was made otherwise: {_short(lines)}; {self.anew(artifact)}")
        return manifest

    def require(self, artifact: str) -> Manifest:
        """The manifest of a finished artifact. Raises DriftError, MissingArtifact naming its command."""
        manifest = self.finished(artifact)
        if manifest is None:
            raise MissingArtifact(f"{self.url} has no finished {artifact} yet; make it with: {self.command(artifact)}")
        return manifest

    def command(self, artifact: str) -> str:
        """The command that makes an artifact of this run."""
        kind, *rest = artifact.split("/")
        if kind == EVALUATIONS:
            return f"ddm evaluate {self.url} --name {rest[0]}"
        if verb := {ROWS: "prepare", PARTITION: "partition"}.get(kind):
            owner = ""
            if self.config.partition.method == "given" and "=" in artifact:
                source = " --source URI" if kind == ROWS else ""
                owner = f" --cluster {int(artifact.rpartition('=')[2])}{source}"
            return f"ddm {verb} {self.url}{owner}"
        return f"ddm train {self.url} {kind if kind != 'experts' else f'expert {int(rest[0])}'}"

    def read(self, artifact: str, name: str, manifest: Manifest | None = None) -> bytes:
        """One verified file of a finished artifact. Raises CorruptArtifact if it is gone or altered."""
        manifest = manifest or self.require(artifact)
        where = f"{self.url}/{artifact}/{name}"
        try:
            data = self.store.read(f"{artifact}/{name}")
        except FileNotFoundError:
            raise CorruptArtifact(f"{where}: gone, though its manifest lists it; {self.anew(artifact)}") from None
        try:
            return verify(data, manifest.files[name], where)
        except CorruptArtifact as error:
            raise CorruptArtifact(f"{error}; {self.anew(artifact)}") from None

    def anew(self, artifact: str) -> str:
        """How to make an artifact anew."""
        return f"delete {self.url}/{artifact}, then: {self.command(artifact)}"

    def commit(self, artifact: str, names: list[str], info: dict[str, Any], content: str | None = None) -> Manifest:
        """Checksum the files `names`, already written below the artifact, and create its manifest, last.

        `content`: see Manifest. Where a rival committed first, theirs counts and is returned.
        """
        records = {}
        for name in sorted(names):
            data = self.store.read(f"{artifact}/{name}")
            records[name] = FileRecord.of(data)
        return self.commit_records(artifact, records, info, content)

    def commit_records(
        self,
        artifact: str,
        records: dict[str, FileRecord],
        info: dict[str, Any],
        content: str | None = None,
        identity: Identity | None = None,
    ) -> Manifest:
        """As `commit`, for files whose checksums are known; `identity` is that of the stage's start, if not now's."""
        manifest = Manifest(artifact, identity or self.identity(artifact), records, info, content)
        if self.store.create(f"{artifact}/{NAME}", manifest.to_json()):
            return manifest
        there = self.finished(artifact)
        assert there is not None
        return there


def _short(lines: list[str], most: int = 4) -> str:
    return "; ".join(lines[:most]) + (f" and {len(lines) - most} more" if len(lines) > most else "")
