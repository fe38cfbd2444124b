"""Shards by their manifests: that of the partition, the files of a split, and the null text."""

from ddm_ray.core.condition import Text
from ddm_ray.data.partition.state import manifest_key
from ddm_ray.data.texts import read_null_text
from ddm_ray.errors import DriftError
from ddm_ray.models.null_text import NULL_TEXT
from ddm_ray.storage.graph import PARTITION, Artifact
from ddm_ray.storage.manifest import NAME, FileRecord, Manifest
from ddm_ray.storage.run import Run
from ddm_ray.storage.sealed import read_sealed


def require_shard(run: Run, artifact: Artifact) -> Manifest:
    """The manifest of a finished shard that is of the partition, where there is one; or of images in its place.

    Raises MissingArtifact, CorruptArtifact, and DriftError for a shard that another partition made.
    """
    manifest, partition = run.require(artifact), run.manifest(PARTITION)
    if partition is not None and artifact.kind == "shard":
        data = read_sealed(run.store, f"{artifact}/{NAME}")
        listed = partition.files.get(manifest_key(artifact))
        if listed != FileRecord.of(data):
            raise DriftError(f"{run.url}/{artifact} isn't the shard that {PARTITION} lists", run.remake(PARTITION))
    return manifest


def files_of(manifest: Manifest, split: str) -> list[str]:
    """Names of a shard's files of one split, in the order of their rows."""
    return sorted(name for name in manifest.files if name.startswith(f"{split}-"))


def null_text_of(run: Run, artifact: Artifact) -> Text | None:
    """The null text of a run's shards, by any one of them; None where conditions are labels."""
    text = run.config.data.text
    if text is None:
        return None
    return read_null_text(run.read(artifact, NULL_TEXT), f"{run.url}/{artifact}/{NULL_TEXT}", text)
