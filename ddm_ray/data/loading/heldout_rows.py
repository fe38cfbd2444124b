"""A bounded number of held-out rows of shards: always the same ones, read from as few files as possible."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from ddm_ray.data.loading.cache import local_files
from ddm_ray.data.loading.shard_files import FirstRows, first_rows, place_of_shard, require_shard
from ddm_ray.data.loading.stored_rows import StoredRows
from ddm_ray.data.schema import HELDOUT, shard_schema
from ddm_ray.errors import CorruptArtifact
from ddm_ray.run.graph import Artifact
from ddm_ray.run.info import ShardInfo
from ddm_ray.run.run import Run


def count_heldout(run: Run, artifacts: Sequence[Artifact]) -> int:
    """Number of held-out rows of the shards by their manifests. Raises MissingArtifact, DriftError, CorruptArtifact."""
    return sum(ShardInfo.of(require_shard(run, artifact)).rows_heldout for artifact in artifacts)


def heldout_rows(run: Run, artifacts: Sequence[Artifact], most: int, cache: str | None) -> StoredRows:
    """At most `most` held-out rows of one or more shards, in proportion to the shards' sizes, as they were prepared.

    They are the first rows of each shard, and of each time that rows were appended to it; rows are stored in a
    shuffled order. `cache`: see `local_files`.
    Raises MissingArtifact, DriftError, StorageError, and CorruptArtifact for a file that isn't as it was written.
    """
    shares = first_rows(run, artifacts, HELDOUT, most)
    rows, taken = StoredRows(run.config.data, sum(share.rows for share in shares)), 0
    for share in shares:
        for table in _tables(run, share, cache):
            rows.fill(taken, table, place_of_shard(run, share.manifest))
            taken += table.num_rows
    return rows


def _tables(run: Run, share: FirstRows, cache: str | None) -> list[pa.Table]:
    """The rows, by row groups."""
    columns = [name for name in shard_schema(run.config.data).names if name != "id"]
    tables: list[pa.Table] = []
    left = share.rows
    for name in share.files if left else ():
        where = f"{run.url}/{share.manifest.artifact}/{name}"
        with local_files(run, share.manifest, [name], cache) as (file,):
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
        raise share.lacking(run)
    return tables
