"""The parquet schemas that tie the stages: an encoded image, a row, a shard's row.

N rows, C channels, H x W pixels, D dimensions of an embedding.
"""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ddm_ray.storage.run import Run

TRAIN = "train"
HELDOUT = "heldout"

SOURCE = pa.schema([("id", pa.string()), ("image", pa.binary()), ("label", pa.int64())])
"""What a source yields: `id` the source's key, `image` the encoded file's bytes."""


def decoded_schema(shape: tuple[int, int, int]) -> pa.Schema:
    """A row before its embedding; `data` in [-1, 1], `content_hash` the encoded bytes' SHA-256 in hex."""
    return pa.schema(
        [
            ("id", pa.string()),
            ("content_hash", pa.string()),
            ("data", pa.list_(pa.float32(), int(np.prod(shape)))),
            ("label", pa.int64()),
            ("split", pa.string()),
        ]
    )


def rows_schema(shape: tuple[int, int, int], embedding_dim: int) -> pa.Schema:
    """A row of the artifact `rows`; `split` is TRAIN or HELDOUT."""
    embedding = pa.field("embedding", pa.list_(pa.float32(), embedding_dim))
    return decoded_schema(shape).append(embedding)


def shard_schema(shape: tuple[int, int, int]) -> pa.Schema:
    """A row of one cluster's shard."""
    return pa.schema(
        [
            ("id", pa.string()),
            ("data", pa.list_(pa.float32(), int(np.prod(shape)))),
            ("label", pa.int64()),
            ("cluster", pa.int32()),
            ("split", pa.string()),
        ]
    )


def vectors(values: np.ndarray) -> pa.FixedSizeListArray:
    """A column of float32 vectors from an array (N, ...), each row flattened."""
    width = int(np.prod(values.shape[1:]))
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), width)


def matrix(table: pa.Table, column: str) -> np.ndarray:
    """A column of vectors as float32 (N, width)."""
    width = table.schema.field(column).type.list_size
    chunks = [chunk.flatten().to_numpy() for chunk in table[column].chunks]
    flat = np.concatenate(chunks) if chunks else np.empty(0, np.float32)
    return flat.reshape(-1, width)


def images(table: pa.Table, shape: tuple[int, int, int]) -> np.ndarray:
    """The column `data` as float32 NCHW."""
    return matrix(table, "data").reshape(-1, *shape)


def to_parquet(table: pa.Table) -> bytes:
    """One parquet file; equal tables give equal bytes."""
    buffer = io.BytesIO()
    pq.write_table(table.combine_chunks(), buffer)
    return buffer.getvalue()


def read_artifact(run: Run, artifact: str, columns: list[str] | None = None) -> pa.Table:
    """All rows of a finished artifact, sorted by id. Raises MissingArtifact, DriftError, CorruptArtifact."""
    manifest = run.require(artifact)
    names = sorted(name for name in manifest.files if name.endswith(".parquet"))
    files = (io.BytesIO(run.read(artifact, name, manifest)) for name in names)
    return pa.concat_tables([pq.read_table(file, columns=columns) for file in files]).sort_by("id")
