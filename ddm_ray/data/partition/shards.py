"""Shards: what each cluster's expert trains on, in files whose bytes depend on the set of rows alone.

Rows are sorted by their shuffle keys on local disk: bucket by bucket into files, a file being a range of keys.
N rows, C classes, K clusters.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ddm_ray.config import DataConfig
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition.buckets import RowBuckets
from ddm_ray.data.partition.state import ExpectedShard
from ddm_ray.data.schema import (
    HELDOUT,
    TRAIN,
    array,
    as_modelled,
    data_dtype,
    shard_file_schema,
    shard_schema,
    trains,
)
from ddm_ray.data.scratch import OTHER_SCRATCH, as_scratch_error
from ddm_ray.errors import DataError, StorageError
from ddm_ray.models.null_text import NULL_TEXT
from ddm_ray.storage.extension import shard_file
from ddm_ray.storage.graph import ROWS, Artifact, owner_rows, shard
from ddm_ray.storage.info import RowsInfo, ShardInfo
from ddm_ray.storage.manifest import NAME, FileRecord, Manifest
from ddm_ray.storage.run import Run

FILE_BYTES = 256 * 2**20
ROW_GROUP_BYTES = 4 * 2**20
MIN_GROUP_ROWS, MAX_GROUP_ROWS = 16, 8192
BUCKETS_PER_FILE = 32  # sorting holds a few copies of one of them in memory
ID_BYTES = 32


@dataclass
class _Split:
    """One cluster's training or held-out rows: numbers expected, and bytes and rows that came for each file."""

    rows: int
    files: int
    buckets: int
    first_bucket: int  # its number among all buckets
    bytes_of_file: np.ndarray = field(init=False)
    rows_of_file: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.bytes_of_file = np.zeros(self.files, np.int64)
        self.rows_of_file = np.zeros(self.files, np.int64)


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
        self._data = run.config.data
        self._schema = shard_file_schema(self._data)
        # Of the stage's start: rows that are replaced while it runs must not look as if these shards came from them.
        self._identity = {cluster: run.identity(shard(cluster)) for cluster in clusters}
        self._splits: dict[tuple[int, str], _Split] = {}
        num_buckets = 0
        for cluster in clusters:
            for split, rows_K in ((TRAIN, rows_train_K), (HELDOUT, rows_heldout_K)):
                rows = int(rows_K[cluster])
                files = -(-rows * row_bytes(self._data) // file_bytes)
                self._splits[cluster, split] = _Split(rows, files, files * BUCKETS_PER_FILE, num_buckets)
                num_buckets += files * BUCKETS_PER_FILE
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
        here = np.flatnonzero(np.isin(cluster_N, list(self._identity)))
        if not len(here):
            return
        train_N = trains(table)[here]
        table = table.select(self._schema.names).take(pa.array(here)).cast(self._schema)
        key_N = shuffle_keys(table["id"].to_pylist())
        bytes_N = _bytes(table)
        bucket_N = np.empty(len(here), np.int64)
        for (cluster, split), to in self._splits.items():
            mine = np.flatnonzero((cluster_N[here] == cluster) & (train_N == (split == TRAIN)))
            if len(mine):
                local = _share(key_N[mine], to.buckets)
                bucket_N[mine] = to.first_bucket + local
                np.add.at(to.bytes_of_file, local // BUCKETS_PER_FILE, bytes_N[mine])
                np.add.at(to.rows_of_file, local // BUCKETS_PER_FILE, 1)
        self._buckets.add(table, bucket_N)

    def commit(self, cluster: int, centroids: str | None, listed: FileRecord | None = None) -> Manifest:
        """Sort and write the cluster's files, then its manifest.

        All rows must have been added. `centroids`: digest of their manifest, if the clusters have any. `listed`: see
        `ExpectedShard`. A shard that counts already, a concurrent writer's, is returned as it is. Raises DataError
        for data that aren't finite, StorageError.
        """
        artifact, store = shard(cluster), self.run.store
        expected = ExpectedShard(self.run, cluster, centroids, self._identity[cluster], listed)
        expected.invalidate()
        base = self.run.base if self.run.appends else None
        before = base.require(artifact) if base else None
        files = {name: each for name, each in before.files.items() if name != NULL_TEXT} if before else {}
        tally = _Tally(self._data)
        for split in (TRAIN, HELDOUT):
            rows_of_file = self._splits[cluster, split].rows_of_file
            assert rows_of_file.sum() == self._splits[cluster, split].rows
            for number in map(int, np.flatnonzero(rows_of_file)):
                if theirs := expected.finished():
                    return theirs
                path, record = self._file(cluster, split, number, tally if split == TRAIN else None)
                name = shard_file(split, number, self.run.generation)
                store.write(f"{artifact}/{name}", path)
                files[name] = record
        rows = owner_rows(cluster) if self.run.config.partition.given else ROWS
        if self._data.text is not None:
            data = self.run.read(rows, NULL_TEXT)
            store.write(f"{artifact}/{NULL_TEXT}", data)
            files[NULL_TEXT] = FileRecord.of(data)
        # Only files that this shard doesn't have: a concurrent writer of the same shard keeps its own.
        for name in store.sizes(artifact).keys() - files.keys() - {NAME}:
            if not self.run.inherits(f"{artifact}/{name}"):
                store.delete_one(f"{artifact}/{name}")
        train, heldout = self._splits[cluster, TRAIN].rows, self._splits[cluster, HELDOUT].rows
        counts_C, std = tally.counts(), tally.std(artifact)
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
            centroids=centroids,
            networks=RowsInfo.of(made).networks if (made := self.run.manifest(rows)) else {},
        )
        return self.run.commit_records(artifact, files, info, identity=self._identity[cluster])

    def _file(self, cluster: int, split: str, number: int, tally: "_Tally | None") -> tuple[Path, FileRecord]:
        """Write one parquet file of the cluster in scratch, until the next; count its rows, remove its buckets."""
        to = self._splits[cluster, split]
        group_rows = _group_rows(int(to.bytes_of_file[number]) / int(to.rows_of_file[number]))
        first = to.first_bucket + number * BUCKETS_PER_FILE
        path = self.scratch / "file.parquet"
        rows = 0
        with as_scratch_error(self.scratch):
            form: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
            form["write_statistics"] = [name for name in ("id", "label") if name in self._schema.names]
            with pq.ParquetWriter(path, self._schema, **form) as writer:
                for group in _groups(map(self._sorted, range(first, first + BUCKETS_PER_FILE)), group_rows):
                    writer.write_table(group, row_group_size=group_rows)
                    rows += group.num_rows
                    if tally is not None:
                        tally.add(group)
            if rows != to.rows_of_file[number]:
                raise StorageError(f"{self.scratch}: lost rows of cluster {cluster}", OTHER_SCRATCH)
            return path, FileRecord.of_file(path)

    def _sorted(self, bucket: int) -> pa.Table:
        table = self._buckets.take(bucket)
        ids = table["id"].to_pylist()
        return table.take(pa.array(np.lexsort((np.array(ids, dtype=str), shuffle_keys(ids))))).combine_chunks()


class _Tally:
    """Labels and data of training rows, counted by value: exact, in whatever order they come."""

    def __init__(self, config: DataConfig):
        self._dtype = data_dtype(config)
        self._as_bits = np.dtype(f"<u{self._dtype.itemsize}")
        self._num_values = np.zeros(2 ** (8 * self._dtype.itemsize), np.int64)
        self._counts_C = np.zeros(len(config.class_names), np.int64)

    def add(self, table: pa.Table) -> None:
        bits = array(table["data"], self._as_bits).ravel()
        self._num_values += np.bincount(bits, minlength=len(self._num_values))
        if len(self._counts_C):
            self._counts_C += np.bincount(table["label"].to_numpy(), minlength=len(self._counts_C))

    def counts(self) -> list[int]:
        """counts_C of rows; empty for texts."""
        counts_C: list[int] = self._counts_C.tolist()
        return counts_C

    def std(self, artifact: Artifact) -> float:
        """Standard deviation of the data as modelled. Raises DataError naming the artifact if any isn't finite."""
        present = np.flatnonzero(self._num_values)
        values = as_modelled(present.astype(self._as_bits).view(self._dtype)).astype(np.float64)
        if not np.isfinite(values).all():
            raise DataError(f"{artifact}: some data aren't finite; check data.latents, then prepare the rows anew")
        if not len(present):
            return 0.0
        weights = self._num_values[present] / self._num_values.sum()
        return float(np.sqrt(weights @ (values - weights @ values) ** 2))


def row_bytes(config: DataConfig) -> int:
    """Approximate bytes of a shard's row; half of a text's tokens are assumed to count."""
    widths = [field.type.byte_width for field in shard_schema(config) if pa.types.is_fixed_size_binary(field.type)]
    condition = 8 if config.text is None else config.text.token_bytes // 2
    return ID_BYTES + condition + sum(widths)


def _bytes(table: pa.Table) -> np.ndarray:
    """bytes_N of each row's columns."""
    total = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        if pa.types.is_int64(column.type):
            total += 8
        elif pa.types.is_fixed_size_binary(column.type):
            total += column.type.byte_width
        else:
            total += pc.binary_length(column).to_numpy()
    return total


def _share(key_N: np.ndarray, shares: int) -> np.ndarray:
    """floor(key * shares / 2^64), exactly, for shares below 2^32."""
    high, low = key_N >> np.uint64(32), key_N & np.uint64(2**32 - 1)
    by = np.uint64(shares)
    return ((high * by + (low * by >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)


def _group_rows(mean_row_bytes: float) -> int:
    """Rows of a row group: the power of two whose columns come nearest below ROW_GROUP_BYTES."""
    fitting = 2 ** int(np.log2(max(1.0, ROW_GROUP_BYTES / mean_row_bytes)))
    return min(max(fitting, MIN_GROUP_ROWS), MAX_GROUP_ROWS)


def _groups(tables: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of `rows` rows each, the last one of fewer."""
    rest: pa.Table | None = None
    for table in tables:
        rest = table if rest is None else pa.concat_tables([rest, table])
        full = rest.num_rows // rows * rows
        for start in range(0, full, rows):
            yield rest.slice(start, rows).combine_chunks()
        rest = rest.slice(full).combine_chunks()
    if rest is not None and rest.num_rows:
        yield rest
