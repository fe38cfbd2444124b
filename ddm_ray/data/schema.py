"""The parquet schemas that connect the stages (a row, a shard's row), and arrays as columns of them.

N rows, C channels, H x W pixels, D dimensions of an embedding, L tokens of E channels.
"""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ddm_ray.config import DataConfig
from ddm_ray.errors import CorruptArtifact

DUPLICATES = "duplicates.parquet"
"""File of an artifact of rows: the ids of rows that are dropped as duplicates."""
CHECKED_PAGES = b"ddm-ray.checked_pages"
"""Metadata key of a parquet file with a checksum on every page, so that single columns can be verified."""
MIRRORED = "mirrored"
"""Column with the latents of a row's mirror image."""
TRAIN = "train"
HELDOUT = "heldout"
EMBEDDING = np.dtype("<f4")
TEXT = np.dtype("<f2")
IDS = np.dtype("<u4")


def data_dtype(config: DataConfig) -> np.dtype:
    """Type of the column `data`: decoded pixels, uint8 (exact); or latents rounded to float16."""
    return np.dtype("u1") if config.latents is None else np.dtype("<f2")


def shard_schema(config: DataConfig) -> pa.Schema:
    """Columns of a row for its expert: `data`, and its `label`, or the unpadded `text_tokens` and `text_pooled`.

    Texts are stored encoded or as ids. As ids, `text_pooled` exists only if the pooled vector has its own encoder.

    `data` are pixels with the margin for crops; or latents, with a column for those of the mirror image if both are
    stored. Arrays are stored as bytes (little-endian, C order), since parquet's own lists are read many times slower.
    A row's cluster and split are those of its shard and file.
    """
    fields = [("id", pa.string()), ("data", _array(config.stored_shape, data_dtype(config)))]
    if config.stores_mirrored:
        fields.append((MIRRORED, _array(config.shape, data_dtype(config))))
    if config.text is None:
        return pa.schema([*fields, ("label", pa.int64())])
    fields.append(("text_tokens", pa.binary()))
    if config.text.stored == "ids":
        if config.text.pooled_encoder is not None:
            fields.append(("text_pooled", pa.binary()))
    elif config.text.pooled_dim is not None:
        fields.append(("text_pooled", _array((config.text.pooled_dim,), TEXT)))
    return pa.schema(fields)


def shard_file_schema(config: DataConfig) -> pa.Schema:
    """Columns of a shard's files: those of `shard_schema`, and the caption `text` if rows have one.

    Evaluations read captions, training doesn't.
    """
    schema = shard_schema(config)
    return schema if config.text is None else schema.append(pa.field("text", pa.string()))


def rows_schema(config: DataConfig, embedding_dim: int) -> pa.Schema:
    """A row of the artifact `rows`: the shard's columns, and those that the partition and its report need.

    `content_hash` is the encoded file's SHA-256 in hex, `split` TRAIN or HELDOUT. `embedding` is left out if it has no
    dimensions. `thumbnail` is a JPEG, for rows of latents; `text` is the caption, for rows that have one.
    """
    schema = shard_schema(config)
    schema = schema.append(pa.field("content_hash", pa.string())).append(pa.field("split", pa.string()))
    if embedding_dim:
        schema = schema.append(pa.field("embedding", _array((embedding_dim,), EMBEDDING)))
    if config.latents is not None:
        schema = schema.append(pa.field("thumbnail", pa.binary()))
    if config.text is not None:
        schema = schema.append(pa.field("text", pa.string()))
    return schema


def _array(shape: tuple[int, ...], dtype: np.dtype) -> pa.DataType:
    return pa.binary(int(np.prod(shape)) * dtype.itemsize)


def column(values: np.ndarray, dtype: np.dtype) -> pa.FixedSizeBinaryArray:
    """Convert an array (N, ...) to a column of arrays."""
    values = np.ascontiguousarray(values, dtype)
    width = int(np.prod(values.shape[1:])) * dtype.itemsize
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(values), [None, pa.py_buffer(values)])


def array(column: pa.ChunkedArray | pa.Array, dtype: np.dtype, shape: tuple[int, ...] = (-1,)) -> np.ndarray:
    """Convert a column of arrays to one array (N, *shape). It is read-only if no copy was needed."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    width = column.type.byte_width
    parts = []
    for chunk in chunks:
        if len(chunk):
            data = np.frombuffer(chunk.buffers()[1], np.uint8)[
                chunk.offset * width : (chunk.offset + len(chunk)) * width
            ]
            parts.append(data.view(dtype))
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, dtype)
    per_row = width // dtype.itemsize
    return flat.reshape(len(column), *(shape if shape != (-1,) else (per_row,)))


def embeddings(table: pa.Table) -> np.ndarray:
    """embeddings_ND float32."""
    return array(table["embedding"], EMBEDDING)


def stored_images(table: pa.Table, config: DataConfig) -> np.ndarray:
    """The column `data` as it is stored, NCHW, without the margin for crops."""
    return middle(array(table["data"], data_dtype(config), config.stored_shape), config.crop_margin)


def middle(data_NCHW: np.ndarray, margin: int) -> np.ndarray:
    """The centre of images, `margin` pixels smaller in each dimension; a view."""
    height, width = (side - margin for side in data_NCHW.shape[-2:])
    first = margin // 2
    return data_NCHW[..., first : first + height, first : first + width]


def images(table: pa.Table, config: DataConfig) -> np.ndarray:
    """The column `data` as the networks see it: float32 NCHW, pixels in [-1, 1]."""
    return as_modelled(stored_images(table, config))


def trains(table: pa.Table) -> np.ndarray:
    """train_N bool: True for rows of the training split."""
    train_N: np.ndarray = pc.equal(table["split"], TRAIN).to_numpy()
    return train_N


def as_modelled(data_NCHW: np.ndarray) -> np.ndarray:
    """Stored pixels (uint8) or latents (float16) as float32, pixels in [-1, 1]."""
    import torch  # many times faster than numpy at float16; imported here, since reading rows doesn't need it

    stored_NCHW = torch.from_numpy(data_NCHW) if data_NCHW.flags.writeable else torch.tensor(data_NCHW)
    modelled_NCHW = stored_NCHW.float()
    if data_NCHW.dtype == np.uint8:
        modelled_NCHW.div_(127.5).sub_(1)
    return np.asarray(modelled_NCHW)


def to_parquet(table: pa.Table, row_group_rows: int | None = None) -> bytes:
    """One uncompressed parquet file. Equal tables give equal bytes."""
    buffer = io.BytesIO()
    arrays = [field.name for field in table.schema if field.type not in (pa.string(), pa.int64())]
    form: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    form["write_statistics"] = [name for name in table.column_names if name not in arrays]
    with pq.ParquetWriter(buffer, table.schema, **form) as writer:
        writer.write_table(table.combine_chunks(), row_group_size=row_group_rows or max(1, table.num_rows))
        writer.add_key_value_metadata({CHECKED_PAGES: b"yes"})
    return buffer.getvalue()


def read_parquet(data: bytes, where: str, columns: list[str] | None = None) -> pa.Table:
    """The table in a parquet file's bytes. Raises CorruptArtifact naming `where` if it isn't one."""
    try:
        return pq.read_table(pa.BufferReader(data), columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise CorruptArtifact(f"{where}: not a whole parquet file ({' '.join(str(error).split())[:120]})") from None
