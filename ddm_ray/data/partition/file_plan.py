"""Files of shards: which file a row belongs to, and its bytes, which depend only on the set of its rows.

N rows, K clusters.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ddm_ray.config import DataConfig
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition.tally import Tally
from ddm_ray.data.schema import HELDOUT, TRAIN, shard_file_schema, shard_schema, trains
from ddm_ray.run.inheriting import shard_file

FILE_BYTES = 256 * 2**20
ROW_GROUP_BYTES = 4 * 2**20
MIN_GROUP_ROWS, MAX_GROUP_ROWS = 16, 8192
ID_BYTES = 32


@dataclass(frozen=True)
class ShardFile:
    """A file of a shard: of a cluster's training or held-out rows, those in one of `of` equal ranges of shuffle keys.

    `place`: the file's number among all files of a plan. `cluster`: by its place among those that rows are divided
    into.
    """

    place: int
    cluster: int
    split: str
    number: int
    of: int

    def name(self, generation: int) -> str:
        """The file's name below the shard."""
        return shard_file(self.split, self.number, generation)


class FilePlan:
    """The files of some clusters' shards, from exact row counts of all clusters. Can be pickled."""

    def __init__(
        self,
        config: DataConfig,
        rows_train_K: np.ndarray,
        rows_heldout_K: np.ndarray,
        clusters: Sequence[int],
        file_bytes: int = FILE_BYTES,
    ):
        self._config, self.file_bytes = config, file_bytes
        self.rows = {TRAIN: rows_train_K, HELDOUT: rows_heldout_K}
        # Place of the first file, -1 if none is of this plan, and the number of files. Last: rows of no cluster (-1).
        self._first_2K = np.full((len(self.rows), len(rows_train_K) + 1), -1)
        self._of_2K = np.ones_like(self._first_2K)
        self.files: list[ShardFile] = []
        for cluster in clusters:
            for row, (split, rows_K) in enumerate(self.rows.items()):
                number_of = -(-int(rows_K[cluster]) * row_bytes(config) // file_bytes)
                own = [
                    ShardFile(len(self.files) + number, cluster, split, number, number_of)
                    for number in range(number_of)
                ]
                if own:
                    self._first_2K[row, cluster], self._of_2K[row, cluster] = own[0].place, number_of
                self.files += own

    def of(self, cluster: int) -> list[ShardFile]:
        """The files of a cluster's shard. Some may turn out to have no rows."""
        return [file for file in self.files if file.cluster == cluster]

    def groups(self, files: Iterable[ShardFile], max_bytes: int) -> list[list[ShardFile]]:
        """Group the files, about `max_bytes` at most per group, or a single larger file."""
        groups: list[list[ShardFile]] = []
        held = 0
        for file in files:
            size = int(self.rows[file.split][file.cluster]) * row_bytes(self._config) // file.of
            if not groups or held + size > max_bytes:
                groups.append([])
                held = 0
            groups[-1].append(file)
            held += size
        return groups

    def split(self, table: pa.Table, cluster_N: np.ndarray, places: Collection[int]) -> Iterator[tuple[int, pa.Table]]:
        """Yield a table's rows that belong to the files at these places: the place, and the rows as files have them."""
        schema = shard_file_schema(self._config)
        at = np.where(trains(table), 0, 1), cluster_N  # in the order of `rows`
        place_N = self._first_2K[at] + _share(shuffle_keys(table["id"].to_pylist()), self._of_2K[at])
        here = np.flatnonzero(np.isin(place_N, list(places)))
        if not len(here):
            return
        order = here[np.argsort(place_N[here], kind="stable")]
        rows, starts = table.select(schema.names).take(pa.array(order)).cast(schema), _starts(place_N[order])
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            yield int(place_N[order[start]]), rows.slice(start, end - start)


def write_rows(path: Path, rows: pa.Table, schema: pa.Schema, tally: Tally | None) -> None:
    """Write a file of rows, sorted by their shuffle keys and then by their ids, and count them in `tally`.

    Takes the memory of one row group besides the rows. Raises OSError.
    """
    group_rows = _group_rows(int(bytes_of_rows(rows).sum()) / rows.num_rows)
    ids, rows = rows["id"].to_pylist(), rows.combine_chunks()
    order = np.lexsort((np.array(ids, dtype=str), shuffle_keys(ids)))
    form: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    form["write_statistics"] = [name for name in ("id", "label") if name in schema.names]
    with pq.ParquetWriter(path, schema, **form) as writer:
        for start in range(0, len(order), group_rows):
            group = rows.take(pa.array(order[start : start + group_rows])).combine_chunks()
            writer.write_table(group, row_group_size=group_rows)
            if tally is not None:
                tally.add(group)


def row_bytes(config: DataConfig) -> int:
    """Approximate bytes of a shard's row, assuming that half of a text's tokens aren't padding."""
    widths = [field.type.byte_width for field in shard_schema(config) if pa.types.is_fixed_size_binary(field.type)]
    condition = 8 if config.text is None else config.text.token_bytes // 2
    return ID_BYTES + condition + sum(widths)


def bytes_of_rows(rows: pa.Table) -> np.ndarray:
    """bytes_N: each row's bytes in all columns."""
    total = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
        if pa.types.is_int64(column.type):
            total += 8
        elif pa.types.is_fixed_size_binary(column.type):
            total += column.type.byte_width
        else:
            total += pc.binary_length(column).to_numpy()
    return total


def _share(key_N: np.ndarray, shares_N: np.ndarray) -> np.ndarray:
    """floor(key * shares / 2^64), exactly, for shares below 2^32."""
    high, low = key_N >> np.uint64(32), key_N & np.uint64(2**32 - 1)
    by_N = shares_N.astype(np.uint64)
    return ((high * by_N + (low * by_N >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)


def _group_rows(mean_row_bytes: float) -> int:
    """Rows of a row group: the largest power of two with columns below ROW_GROUP_BYTES, within bounds."""
    fitting = 2 ** int(np.log2(max(1.0, ROW_GROUP_BYTES / mean_row_bytes)))
    return min(max(fitting, MIN_GROUP_ROWS), MAX_GROUP_ROWS)


def _starts(sorted_N: np.ndarray) -> np.ndarray:
    """The index at which each value begins."""
    starts: np.ndarray = np.flatnonzero(np.diff(sorted_N, prepend=-1))
    return starts
