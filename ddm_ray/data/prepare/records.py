"""Rows in the making: the plan of a source, and how a chunk's rows are stored, recorded and read again."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.reasons import commonest
from ddm_ray.data.schema import EMBEDDING, HELDOUT, read_parquet, to_parquet
from ddm_ray.data.sharded.chunk_store import HASH, ChunkRecord, ChunkStore, Hashes, StoredFile
from ddm_ray.data.sources import Unit
from ddm_ray.run.chunk_records import ChunkKey
from ddm_ray.run.graph import Artifact
from ddm_ray.run.run import Run
from ddm_ray.store.checksummed import canonical

REJECTED = "_rejected"
"""Folder below the artifact of rows with the reasons of rejected rows."""


@dataclass(frozen=True)
class SourcePlan:
    """A source as it was when the rows were begun; see Listing.

    `bounded`: False in plans of older versions, which cut chunks and decoded images otherwise: their rows can be read,
    but not finished. They have no `numbered` either.
    """

    source: str
    chunk_rows: int
    classes: tuple[str, ...] | None
    units: tuple[Unit, ...]
    ignored: dict[str, int] = field(default_factory=dict)
    bounded: bool = False
    numbered: tuple[str, ...] | None = None


@dataclass(frozen=True)
class EmbeddedRows:
    """A chunk's rows as a table of `rows_schema`, and {id, reason} of its rejected rows.

    `losses`: {id, reason} of rows of the table that lost something, such as the end of a caption.
    """

    table: pa.Table
    rejected: list[dict[str, str]]
    losses: list[dict[str, str]] = field(default_factory=list)

    @property
    def embedding_dim(self) -> int:
        """D; 0 if there are no embeddings."""
        if "embedding" not in self.table.column_names:
            return 0
        return self.table.schema.field("embedding").type.byte_width // EMBEDDING.itemsize


@dataclass(frozen=True)
class RowsRecord(ChunkRecord):
    """A finished chunk of rows.

    `digest`: of the rows' contents. `digest` and `part` are None if no row was usable. `reasons`: a file with each
    rejected row's reason, of which `commonest` has the most common ones; `losses`: those of what usable rows lost. The
    hashes have 8 bytes per usable row.
    """

    rows: int
    heldout: int
    rejected: int
    embedding_dim: int
    digest: str | None
    part: StoredFile | None
    reasons: StoredFile | None
    commonest: list[dict[str, Any]]
    id_hashes_N: Hashes
    content_hashes_N: Hashes
    losses: list[dict[str, Any]] = field(default_factory=list)


RowsStore = ChunkStore[SourcePlan, RowsRecord]


def rows_store(run: Run, artifact: Artifact) -> RowsStore:
    """The store of an artifact of rows in the making: `rows`, or one owner's."""
    return ChunkStore(run, artifact, SourcePlan, RowsRecord)


def store_rows(chunks: RowsStore, key: ChunkKey, rows: EmbeddedRows) -> RowsRecord:
    """Finish a chunk with these rows; returns the valid record."""
    table, rejected = rows.table, rows.rejected
    record = RowsRecord(
        key=key,
        rows=table.num_rows,
        heldout=table["split"].to_pylist().count(HELDOUT),
        rejected=len(rejected),
        embedding_dim=rows.embedding_dim,
        digest=content_digest(table) if table.num_rows else None,
        part=chunks.put(key, "part-", ".parquet", to_parquet(table)) if table.num_rows else None,
        reasons=chunks.put(key, f"{REJECTED}/", ".json", canonical(rejected)) if rejected else None,
        commonest=commonest(rejected),
        id_hashes_N=shuffle_keys(table["id"].to_pylist()),
        content_hashes_N=np.array([int(sha[:16], 16) for sha in table["content_hash"].to_pylist()], HASH),
        losses=commonest(rows.losses),
    )
    return chunks.finish(record)


def read_rows(chunks: RowsStore, record: RowsRecord, columns: list[str]) -> pa.Table:
    """Columns of a finished chunk's rows, in the given order. Raises CorruptArtifact if its part is altered."""
    assert record.part
    name, _ = record.part
    return read_parquet(chunks.read(record, name), f"{chunks.url}/{name}", columns).select(columns)


def content_digest(table: pa.Table) -> str:
    """Hex SHA-256 of the values in a table's rows, independent of the file format."""
    digest = hashlib.sha256(canonical([[field.name, str(field.type)] for field in table.schema]))
    for values in table.combine_chunks().columns:
        if values.type == pa.int64():
            digest.update(values.to_numpy().astype("<i8").tobytes())
            continue
        if not pa.types.is_fixed_size_binary(values.type):
            digest.update(pc.binary_length(values).to_numpy().astype("<i8").tobytes())
        for value in values:
            digest.update(value.as_buffer())
    return digest.hexdigest()
