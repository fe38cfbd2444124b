"""What of a partition is there and counts; nothing that a rival, the same stage elsewhere, has finished is unmade."""

from ddm_ray.data import REPORT
from ddm_ray.errors import CorruptArtifact
from ddm_ray.storage.manifest import NAME, FileRecord, Identity, Manifest, drift, sha256
from ddm_ray.storage.run import CENTROIDS, PARTITION, Run, shard

SHARDS = "shards"


def below(artifact: str) -> str:
    """Name of an artifact's manifest among the partition's files."""
    return f"{artifact.removeprefix(f'{PARTITION}/')}/{NAME}"


def finished_shard(
    run: Run, cluster: int, centroids: str | None, identity: Identity, listed: FileRecord | None = None
) -> Manifest | None:
    """The manifest of a shard with all its files, of these rows and centroids; None if it isn't there.

    `listed`: a finished partition's record of the manifest; no other counts then.
    """
    artifact = shard(cluster)
    try:
        manifest = run.manifest(artifact)
    except CorruptArtifact:
        return None
    if manifest is None:
        return None
    if listed is not None:
        if sha256(manifest.to_json()) != listed.sha256:
            return None
    elif drift(identity, manifest.identity) or manifest.info["centroids"] != centroids:
        return None
    sizes = run.store.sizes(artifact)
    return manifest if all(sizes.get(name) == record.bytes for name, record in manifest.files.items()) else None


def unmake_shard(
    run: Run, cluster: int, centroids: str | None, identity: Identity, listed: FileRecord | None = None
) -> None:
    """Delete the manifest of a shard that doesn't count, see `finished_shard`."""
    key = f"{shard(cluster)}/{NAME}"
    # Looked for first: what a rival commits after this look was never found wanting.
    if run.store.exists(key) and finished_shard(run, cluster, centroids, identity, listed) is None:
        run.store.delete_one(key)


def check_finished(run: Run, whole: Manifest) -> None:
    """Raises CorruptArtifact naming a file of a finished partition that is gone or of another size, shards aside."""
    sizes = {name: record.bytes for name, record in whole.files.items() if not name.startswith(f"{SHARDS}/")}
    if (record := whole.files.get(below(CENTROIDS))) is not None:
        try:
            manifest = run.manifest(CENTROIDS)
        except CorruptArtifact:
            manifest = None
        if manifest is None or sha256(manifest.to_json()) != record.sha256:
            raise _gone(run, below(CENTROIDS))
        folder = CENTROIDS.removeprefix(f"{PARTITION}/")
        sizes |= {f"{folder}/{name}": file.bytes for name, file in manifest.files.items()}
    folders = {name.split("/")[0] for name in sizes} | {REPORT}
    there = {
        f"{folder}/{name}": size
        for folder in sorted(folders)
        for name, size in run.store.sizes(f"{PARTITION}/{folder}").items()
    }
    for name, size in sizes.items():
        if there.get(name) != size:
            raise _gone(run, name)


def write_report(run: Run, files: dict[str, bytes]) -> dict[str, bytes]:
    """Write a report's files, by name below the partition; returns what other bytes were replaced, by name."""
    replaced = {}
    for name, data in files.items():
        key = f"{PARTITION}/{name}"
        if run.store.create(key, data):
            continue
        there = run.store.read(key)
        if there != data:
            run.store.write(key, data)
            replaced[name] = there
    return replaced


def restore_report(run: Run, replaced: dict[str, bytes], winner: Manifest) -> None:
    """Put back what `write_report` replaced of the report of a rival that then finished first."""
    for name, data in replaced.items():
        record = winner.files.get(name)
        if record is not None and record.sha256 == sha256(data):
            run.store.write(f"{PARTITION}/{name}", data)


def _gone(run: Run, name: str) -> CorruptArtifact:
    return CorruptArtifact(
        f"{run.url}/{PARTITION}/{name}: gone or altered, though the partition lists it; delete"
        f" {run.url}/{PARTITION}/{NAME}, then: {run.command(PARTITION)}"
    )
