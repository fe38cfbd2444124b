"""Finished parts of a partition that are valid. Nothing that a concurrent writer has finished is ever deleted."""

from collections.abc import Callable
from dataclasses import dataclass

from ddm_ray.errors import CorruptArtifact
from ddm_ray.run.graph import CENTROIDS, PARTITION, Artifact, shard
from ddm_ray.run.info import ShardInfo
from ddm_ray.run.manifest import NAME, FileRecord, Identity, Manifest, sha256
from ddm_ray.run.run import Run

SHARDS = "shards"


def manifest_key(artifact: Artifact) -> str:
    """Name of an artifact's manifest among the partition's files."""
    return f"{artifact.removeprefix(f'{PARTITION}/')}/{NAME}"


@dataclass(frozen=True)
class ExpectedShard:
    """Describes a valid shard: made with the centroids of this digest, under this identity, from the `rows` of a run.

    `listed`: a finished partition's record of the manifest. If it is given, only that manifest is valid.
    """

    run: Run
    cluster: int
    centroids: str | None
    identity: Identity
    rows: tuple[Run, Artifact]
    listed: FileRecord | None = None

    def finished(self) -> Manifest | None:
        """The shard's manifest, if it is valid and all its files exist."""
        artifact = shard(self.cluster)
        try:
            manifest = self.run.manifest(artifact)
        except CorruptArtifact:
            return None
        if manifest is None:
            return None
        if self.listed is not None:
            if sha256(manifest.to_json()) != self.listed.sha256:
                return None
        elif ShardInfo.of(manifest).centroids != self.centroids or self._drift(manifest):
            return None
        return manifest if has_files(self.run, artifact, manifest) else None

    def _drift(self, manifest: Manifest) -> list[str]:
        return self.run.drift(shard(self.cluster), manifest.identity, self.identity)

    def invalidate(self) -> None:
        """Delete the shard's manifest if it isn't valid."""
        invalidate(self.run, shard(self.cluster), self.finished)


def has_files(run: Run, artifact: Artifact, manifest: Manifest) -> bool:
    """True if all files that a manifest lists exist in the listed size."""
    sizes = run.store.sizes(artifact)
    return all(sizes.get(name) == record.bytes for name, record in manifest.files.items())


def invalidate(run: Run, artifact: Artifact, finished: Callable[[], object | None]) -> None:
    """Delete an artifact's manifest unless `finished`, which reads it again, finds it valid."""
    key = f"{artifact}/{NAME}"
    # `exists` comes first: a manifest that a concurrent writer commits after it is never deleted.
    if run.store.exists(key) and finished() is None:
        run.store.delete_one(key)


def check_finished(run: Run, partition: Manifest) -> None:
    """Raises CorruptArtifact naming a finished partition's file that is missing or of another size.

    Shards and centroids are left out, since they are made again.
    """
    sizes = {name: record.bytes for name, record in partition.files.items() if not name.startswith(f"{SHARDS}/")}
    sizes.pop(manifest_key(CENTROIDS), None)
    stored = {
        f"{folder}/{name}": size
        for folder in sorted({name.split("/")[0] for name in sizes})
        for name, size in run.store.sizes(f"{PARTITION}/{folder}").items()
    }
    for name, size in sizes.items():
        if stored.get(name) != size:
            raise _gone(run, name)


def has_centroids(run: Run, partition: Manifest) -> bool:
    """True if a finished partition's centroids are those that it lists, or if it has none."""
    if (record := partition.files.get(manifest_key(CENTROIDS))) is None:
        return True
    try:
        manifest = run.manifest(CENTROIDS)
    except CorruptArtifact:
        return False
    if manifest is None or sha256(manifest.to_json()) != record.sha256:
        return False
    return has_files(run, CENTROIDS, manifest)


def _gone(run: Run, name: str) -> CorruptArtifact:
    return CorruptArtifact(
        f"{run.url}/{PARTITION}/{name}: gone or altered, though the partition lists it",
        run.mend(PARTITION),
    )
