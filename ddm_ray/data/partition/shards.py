"""Shards: what each cluster's expert trains on, in files whose bytes depend on the set of rows alone.

Rows are sorted by their shuffle keys on local disk: bucket by bucket into files, a file being a range of keys.
N rows, C classes, K clusters.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

from ddm_ray.data.partition.buckets import RowBuckets
from ddm_ray.data.partition.file_plan import FILE_BYTES, FilePlan, ShardFile, bytes_of_rows, in_order, write_rows
from ddm_ray.data.partition.made_files import MadeFile
from ddm_ray.data.partition.state import ExpectedShard
from ddm_ray.data.partition.tally import Tally
from ddm_ray.data.schema import HELDOUT, TRAIN, shard_file_schema
from ddm_ray.data.scratch import OTHER_SCRATCH, as_scratch_error
from ddm_ray.errors import RayError, StorageError
from ddm_ray.models.null_text import NULL_TEXT
from ddm_ray.storage.graph import ROWS, owner_rows, shard
from ddm_ray.storage.info import RowsInfo, ShardInfo
from ddm_ray.storage.manifest import NAME, FileRecord, Manifest
from ddm_ray.storage.run import Run

BUCKETS_PER_FILE = 32  # sorting holds a few copies of one of them in memory


class ShardWriter:
    """The shards of `clusters`, from their rows in any order; a context manager.

    `rows_train_K` and `rows_heldout_K` are the exact counts of all clusters. `scratch`: a local folder, made and
    removed here, that takes all the shards' bytes; memory takes about half of `file_bytes`, or twice as many
    where there are very many files. Raises StorageError where the scratch folder refuses.
    """

    def __init__(
        self,
        run: Run,
        rows_train_K: np.ndarray,
        rows_heldout_K: np.ndarray,
        clusters: Sequence[int],
        scratch: Path,
        file_bytes: int = FILE_BYTES,
    ):
        self.run = run
        self.scratch = scratch
        # Of the stage's start: rows that are replaced while it runs must not look as if these shards came from them.
        self._identity = {cluster: run.identity(shard(cluster)) for cluster in clusters}
        self._plan = FilePlan(run.config.data, rows_train_K, rows_heldout_K, clusters, file_bytes)
        self._bytes, self._rows = (np.zeros(len(self._plan.files), np.int64) for _ in range(2))
        self._schema = shard_file_schema(run.config.data)
        num_buckets = len(self._plan.files) * BUCKETS_PER_FILE
        self._buckets = RowBuckets(scratch, self._schema, num_buckets, max(file_bytes // 4, 1))

    def __enter__(self) -> Self:
        with as_scratch_error(self.scratch):
            self.scratch.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)

    def add(self, table: pa.Table, cluster_N: np.ndarray) -> None:
        """Add rows by `rows_schema` and the cluster of each; rows of clusters that aren't written here are left out."""
        rows, bucket_N = self._plan.placed(table, cluster_N, BUCKETS_PER_FILE)
        if not rows.num_rows:
            return
        np.add.at(self._bytes, bucket_N // BUCKETS_PER_FILE, bytes_of_rows(rows))
        np.add.at(self._rows, bucket_N // BUCKETS_PER_FILE, 1)
        self._buckets.add(rows, bucket_N)

    def commit(self, cluster: int, centroids: str | None, listed: FileRecord | None = None) -> Manifest:
        """Sort and write the cluster's files, then its manifest.

        All rows must have been added. `centroids`: digest of their manifest, if the clusters have any. `listed`: see
        `ExpectedShard`. A shard that counts already, a concurrent writer's, is returned as it is. Raises DataError
        for data that aren't finite, StorageError.
        """
        expected = ExpectedShard(self.run, cluster, centroids, self._identity[cluster], listed)
        expected.invalidate()
        tally, files = Tally.none(self.run.config.data), {}
        for file in self._plan.of(cluster):
            if not self._rows[file.place]:
                continue
            if theirs := expected.finished():
                return theirs
            path, record = self._file(file, tally if file.split == TRAIN else None)
            name = file.name(self.run.generation)
            self.run.store.write(f"{shard(cluster)}/{name}", path)
            files[name] = record
        counts = [int(self._plan.rows[split][cluster]) for split in (TRAIN, HELDOUT)]
        assert sum(int(self._rows[file.place]) for file in self._plan.of(cluster)) == sum(counts)
        return commit_shard(expected, files, tally, *counts)

    def _file(self, file: ShardFile, tally: Tally | None) -> tuple[Path, FileRecord]:
        """Write one parquet file in scratch, until the next; count its rows, remove its buckets."""
        first, path, rows = file.place * BUCKETS_PER_FILE, self.scratch / "file.parquet", int(self._rows[file.place])
        buckets = map(self._buckets.take, range(first, first + BUCKETS_PER_FILE))
        with as_scratch_error(self.scratch):
            mean_bytes = int(self._bytes[file.place]) / rows
            if write_rows(path, map(in_order, buckets), self._schema, mean_bytes, tally) != rows:
                raise StorageError(f"{self.scratch}: lost rows of cluster {file.cluster}", OTHER_SCRATCH)
            return path, FileRecord.of_file(path)


def commit_made(expected: ExpectedShard, plan: FilePlan, made: Mapping[int, MadeFile]) -> Manifest:
    """Commit a shard of files that are written, by their places. One that counts already is returned as it is.

    Raises DataError for data that aren't finite, RayError where rows were lost.
    """
    run, cluster, tally = expected.run, expected.cluster, Tally.none(expected.run.config.data)
    if theirs := expected.finished():
        return theirs
    own = [made[file.place] for file in plan.of(cluster) if file.place in made]
    for each in own:
        tally.join(each.tally)
    counts = [int(plan.rows[split][cluster]) for split in (TRAIN, HELDOUT)]
    if sum(each.rows for each in own) != sum(counts):
        raise RayError(f"{run.url}: lost rows of cluster {cluster}; the same command makes their files again")
    return commit_shard(expected, {each.file.name(run.generation): each.record for each in own}, tally, *counts)


def commit_shard(
    expected: ExpectedShard, files: Mapping[str, FileRecord], tally: Tally, train: int, heldout: int
) -> Manifest:
    """Commit a shard whose `files`, by name, are written, with those that it goes on from if rows are appended.

    `tally` is of its training rows; `train` and `heldout` count its rows. Raises DataError for data that aren't finite.
    """
    run, cluster = expected.run, expected.cluster
    artifact, store = shard(cluster), run.store
    base = run.base if run.appends else None
    before = base.require(artifact) if base else None
    named = {name: each for name, each in before.files.items() if name != NULL_TEXT} if before else {}
    named |= files
    rows = owner_rows(cluster) if run.config.partition.given else ROWS
    if run.config.data.text is not None:
        data = run.read(rows, NULL_TEXT)
        store.write(f"{artifact}/{NULL_TEXT}", data)
        named[NULL_TEXT] = FileRecord.of(data)
    # Only files that this shard doesn't have: a concurrent writer of the same shard keeps its own.
    for name in store.sizes(artifact).keys() - named.keys() - {NAME}:
        if not run.inherits(f"{artifact}/{name}"):
            store.delete_one(f"{artifact}/{name}")
    counts_C, std = tally.counts_C.tolist(), tally.std(artifact)
    if before:
        earlier = ShardInfo.of(before)
        train, heldout = train + earlier.rows_train, heldout + earlier.rows_heldout
        counts_C = [sum(both) for both in zip(counts_C, earlier.counts_C, strict=True)]
    info = ShardInfo(
        cluster=cluster,
        rows=train + heldout,
        rows_train=train,
        rows_heldout=heldout,
        counts_C=tuple(counts_C),
        data_std=None if before else std,
        centroids=expected.centroids,
        networks=RowsInfo.of(made).networks if (made := run.manifest(rows)) else {},
    )
    return run.commit_records(artifact, named, info, identity=expected.identity)
