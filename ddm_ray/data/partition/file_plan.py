"""Files of shards: which file a row belongs to, and a file's bytes, which depend on the set of its rows alone.

N rows, K clusters.
"""

from collections.abc import Iterable, Iterator, Sequence
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
from ddm_ray.storage.extension import shard_file

FILE_BYTES = 256 * 2**20
ROW_GROUP_BYTES = 4 * 2**20
MIN_GROUP_ROWS, MAX_GROUP_ROWS = 16, 8192
ID_BYTES = 32


@dataclass(frozen=True)
class ShardFile:
    """A file of a shard: one range of the shuffle keys, of `of` equal ones, of a cluster's training or held-out rows.

    `place`: its number among all files of a plan.
    """

    place: int
    cluster: int
    split: str
    number: int
    of: int

    def name(self, generation: int) -> str:
        """Name below the shard."""
        return shard_file(self.split, self.number, generation)


class FilePlan:
    """The files of some clusters' shards, by exact counts of all clusters' rows. Can be pickled."""

    def __init__(
        self,
        config: DataConfig,
        rows_train_K: np.ndarray,
        rows_heldout_K: np.ndarray,
        clusters: Sequence[int],
        file_bytes: int = FILE_BYTES,
    ):
        self._config = config
        self.rows = {TRAIN: rows_train_K, HELDOUT: rows_heldout_K}
        self._first: dict[tuple[int, str], ShardFile] = {}
        self.files: list[ShardFile] = []
        for cluster in clusters:
            for split, rows_K in self.rows.items():
                number_of = -(-int(rows_K[cluster]) * row_bytes(config) // file_bytes)
                own = [
                    ShardFile(len(self.files) + number, cluster, split, number, number_of)
                    for number in range(number_of)
                ]
                if own:
                    self._first[cluster, split] = own[0]
                self.files += own

    def of(self, cluster: int) -> list[ShardFile]:
        """The files of a cluster's shard; some may turn out to have no rows."""
        return [file for file in self.files if file.cluster == cluster]

    def placed(self, table: pa.Table, cluster_N: np.ndarray, parts: int = 1) -> tuple[pa.Table, np.ndarray]:
        """(rows, place_M): those of a table's rows that are in the plan, as files store them, and the place of each.

        That is the number of its file, times `parts` plus that of its range of the file's keys, if files are cut.
        """
        here = np.flatnonzero(np.isin(cluster_N, [cluster for cluster, _ in self._first]))
        schema = shard_file_schema(self._config)
        if not len(here):
            return schema.empty_table(), np.empty(0, np.int64)
        train_N = trains(table)[here]
        rows = table.select(schema.names).take(pa.array(here)).cast(schema)
        key_N = shuffle_keys(rows["id"].to_pylist())
        place_N = np.empty(len(here), np.int64)
        for (cluster, split), first in self._first.items():
            mine = np.flatnonzero((cluster_N[here] == cluster) & (train_N == (split == TRAIN)))
            place_N[mine] = first.place * parts + _share(key_N[mine], first.of * parts)
        return rows, place_N


def in_order(rows: pa.Table) -> pa.Table:
    """Rows by their shuffle keys, and of equal ones by their ids."""
    ids = rows["id"].to_pylist()
    return rows.take(pa.array(np.lexsort((np.array(ids, dtype=str), shuffle_keys(ids))))).combine_chunks()


def write_rows(
    path: Path, tables: Iterable[pa.Table], schema: pa.Schema, mean_bytes: float, tally: Tally | None
) -> int:
    """Write a file of rows that come in order, of so many bytes a row; the number of rows, which are counted.

    Raises OSError.
    """
    rows, group_rows = 0, _group_rows(mean_bytes)
    form: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    form["write_statistics"] = [name for name in ("id", "label") if name in schema.names]
    with pq.ParquetWriter(path, schema, **form) as writer:
        for group in _groups(iter(tables), group_rows):
            writer.write_table(group, row_group_size=group_rows)
            rows += group.num_rows
            if tally is not None:
                tally.add(group)
    return rows


def row_bytes(config: DataConfig) -> int:
    """Approximate bytes of a shard's row; half of a text's tokens are assumed to count."""
    widths = [field.type.byte_width for field in shard_schema(config) if pa.types.is_fixed_size_binary(field.type)]
    condition = 8 if config.text is None else config.text.token_bytes // 2
    return ID_BYTES + condition + sum(widths)


def bytes_of_rows(rows: pa.Table) -> np.ndarray:
    """bytes_N of each row's columns."""
    total = np.zeros(rows.num_rows, np.int64)
    for column in rows.columns:
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
