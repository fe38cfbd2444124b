"""Shards by their manifests: the one that the partition lists, files of a split, first rows, and the null text."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from ddm_ray.core.condition import Text
from ddm_ray.data.partition.state import manifest_key
from ddm_ray.data.texts import read_null_text
from ddm_ray.errors import CorruptArtifact, DriftError
from ddm_ray.models.null_text import NULL_TEXT
from ddm_ray.run.graph import PARTITION, Artifact
from ddm_ray.run.info import ShardInfo
from ddm_ray.run.inheriting import generation_of
from ddm_ray.run.manifest import NAME, FileRecord, Manifest
from ddm_ray.run.run import Run
from ddm_ray.store.checksummed import read_sealed

FOOTER_BYTES = 64 * 2**10
"""Bytes at a parquet file's end that usually hold its footer."""


def require_shard(run: Run, artifact: Artifact) -> Manifest:
    """The manifest of a finished shard, or of sampled images in its place. If there is a partition, it lists the shard.

    Raises MissingArtifact, CorruptArtifact, and DriftError for a shard of another partition.
    """
    manifest, partition = run.require(artifact), run.manifest(PARTITION)
    if partition is not None and artifact.kind == "shard":
        data = read_sealed(run.store, f"{artifact}/{NAME}")
        listed = partition.files.get(manifest_key(artifact))
        if listed != FileRecord.of(data):
            raise DriftError(f"{run.url}/{artifact} isn't the shard that {PARTITION} lists", run.remake(PARTITION))
    return manifest


def place_of_shard(run: Run, shard: Manifest) -> int:
    """The place of a shard's cluster among those of a run: the expert's place in arrays over K."""
    return run.config.partition.position(ShardInfo.of(shard).cluster)


def files_of(manifest: Manifest, split: str) -> list[str]:
    """Names of a shard's files of one split, in the order of their rows."""
    return sorted(name for name in manifest.files if name.startswith(f"{split}-"))


@dataclass(frozen=True)
class FirstRows:
    """The first `rows` rows of a shard's split, which lie in `files`, sorted by name.

    Rows are ordered by a hash of their ids across the files, so the first rows are a random sample.
    """

    manifest: Manifest
    files: list[str]
    rows: int

    def lacking(self, run: Run) -> CorruptArtifact:
        """The error for files with fewer rows."""
        artifact = Artifact(self.manifest.artifact)
        return CorruptArtifact(f"{run.url}/{artifact}: hasn't the rows that its manifest says", run.mend(artifact))


def first_rows(run: Run, artifacts: Sequence[Artifact], split: str, most: int | None = None) -> list[FirstRows]:
    """At most `most` rows of a split of one or more shards, in proportion to the shards' sizes; None: all rows.

    For a shard with appended rows, each generation gets its share. Raises as `require_shard`.
    """
    parts = [
        (require_shard(run, artifact), generation, count)
        for artifact in sorted(artifacts)
        for generation, count in _generations(run, artifact, split)
    ]
    total, before, taken, shares = sum(count for *_, count in parts), 0, 0, list[FirstRows]()
    for manifest, generation, count in parts:
        before += count
        until = min(total, total if most is None else most) * before // max(1, total)
        files = files_of(manifest, split)
        if generation is not None:
            files = [name for name in files if generation_of(f"{manifest.artifact}/{name}") == generation]
        shares.append(FirstRows(manifest, files, until - taken))
        taken = until
    return shares


def _generations(run: Run, artifact: Artifact, split: str) -> list[tuple[int | None, int]]:
    """The generations of a shard's rows of a split, oldest first, with their numbers of rows.

    One of None: there is only one.
    """
    manifest, files = require_shard(run, artifact), defaultdict[int, list[str]](list)
    for name in files_of(manifest, split):
        files[generation_of(f"{artifact}/{name}") or 0].append(f"{artifact}/{name}")
    if len(files) < 2:
        return [(None, getattr(ShardInfo.of(manifest), f"rows_{split}"))]
    return [(generation, sum(num_rows(run, key) for key in files[generation])) for generation in sorted(files)]


def num_rows(run: Run, key: str) -> int:
    """The number of rows of a parquet file. Reads only its footer. Raises CorruptArtifact."""
    where = f"{run.url}/{key}"
    try:
        end = run.store.read_end(key, FOOTER_BYTES)
        size = int.from_bytes(end[-8:-4], "little") + 8  # of the footer, and of the length and magic after it
        if size > len(end):
            end = run.store.read_end(key, size)
        rows: int = pq.read_metadata(pa.BufferReader(end)).num_rows
    except FileNotFoundError:
        raise CorruptArtifact(f"{where}: gone, though its manifest lists it") from None
    except (pa.ArrowException, OSError) as error:
        raise unreadable(where, error) from None
    return rows


def unreadable(where: str, error: Exception) -> CorruptArtifact:
    """The error for a shard's file that can't be read as parquet."""
    return CorruptArtifact(f"{where}: can't be read ({' '.join(str(error).split())[:120]}); partition the run again")


def null_text_of(run: Run, artifact: Artifact) -> Text | None:
    """The null text of a run's shards, read from any one of them; None if conditions are labels."""
    text = run.config.data.text
    if text is None:
        return None
    return read_null_text(run.read(artifact, NULL_TEXT), f"{run.url}/{artifact}/{NULL_TEXT}", text)
