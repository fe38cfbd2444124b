"""A bounded number of held-out rows of shards, always the same ones, read from as few files as have them."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from ddm_ray.data.loading.cache import local_files
from ddm_ray.data.loading.shard_files import files_of, require_shard
from ddm_ray.data.loading.stored_rows import StoredRows
from ddm_ray.data.schema import HELDOUT, shard_schema
from ddm_ray.errors import CorruptArtifact
from ddm_ray.storage.extension import generation_of
from ddm_ray.storage.graph import Artifact
from ddm_ray.storage.info import ShardInfo
from ddm_ray.storage.manifest import Manifest
from ddm_ray.storage.run import Run


def count_heldout(run: Run, artifacts: Sequence[Artifact]) -> int:
    """Held-out rows of the shards, by their manifests. Raises MissingArtifact, DriftError, CorruptArtifact."""
    return sum(ShardInfo.of(require_shard(run, artifact)).rows_heldout for artifact in artifacts)


def heldout_rows(run: Run, artifacts: Sequence[Artifact], most: int, cache: str | None) -> StoredRows:
    """At most `most` held-out rows of one or more shards, of each as many as its share, as they were prepared.

    They are the first ones of each shard, whose rows lie in an order that was shuffled, and likewise the first of those
    that were appended each time. `cache`: see `local_files`.
    Raises MissingArtifact, DriftError, StorageError, and CorruptArtifact for a file that isn't as it was written.
    """
    config = run.config.data
    parts = [
        (require_shard(run, artifact), generation, count)
        for artifact in sorted(artifacts)
        for generation, count in _generations(run, artifact)
    ]
    total, before, taken = sum(count for *_, count in parts), 0, 0
    rows = StoredRows(config, min(most, total))
    for manifest, generation, count in parts:
        before += count
        upto = rows.num_rows * before // max(1, total)
        names = files_of(manifest, HELDOUT)
        if run.generation:
            names = [name for name in names if generation_of(f"{manifest.artifact}/{name}") == generation]
        for table in _first_rows(run, manifest, names, upto - taken, cache):
            rows.fill(taken, table, ShardInfo.of(manifest).cluster)
            taken += table.num_rows
    return rows


def _generations(run: Run, artifact: Artifact) -> list[tuple[int, int]]:
    """The generations of a shard's held-out rows, the oldest first, and how many rows each has."""
    rows = ShardInfo.of(require_shard(run, artifact)).rows_heldout
    while run.base is not None and run.appends is None:
        run = run.base
    earlier = _generations(run.base, artifact) if run.base is not None else []
    return [*earlier, (run.generation, rows - sum(count for _, count in earlier))]


def _first_rows(run: Run, manifest: Manifest, names: list[str], most: int, cache: str | None) -> list[pa.Table]:
    """The first `most` rows of some files of a shard, group by group."""
    columns = [name for name in shard_schema(run.config.data).names if name != "id"]
    tables: list[pa.Table] = []
    left = most
    for name in names if most else ():
        where = f"{run.url}/{manifest.artifact}/{name}"
        with local_files(run, manifest, [name], cache) as (file,):
            try:
                with file.opened() as path, pq.ParquetFile(path, page_checksum_verification=True) as parquet:
                    for group in range(parquet.num_row_groups):
                        table = parquet.read_row_group(group, columns, use_threads=False)[:left]
                        tables.append(table)
                        left -= table.num_rows
                        if not left:
                            return tables
            except (pa.ArrowException, OSError, KeyError, ValueError) as error:
                raise CorruptArtifact(f"{where}: can't be read ({' '.join(str(error).split())[:120]})") from None
    if left:
        raise CorruptArtifact(f"{run.url}/{manifest.artifact}: hasn't the held-out rows that its manifest says")
    return tables
