"""Read some columns of a parquet file of an artifact, without the others if these are most of its bytes."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ddm_ray.data.schema import CHECKED_PAGES, read_parquet
from ddm_ray.errors import StorageError
from ddm_ray.run.graph import Artifact
from ddm_ray.run.manifest import Manifest
from ddm_ray.run.run import Run

FOOTER_BYTES = 2**16
WHOLE_BYTES = 2**20
"""Files up to this size are read whole: several requests would take longer."""
WORTH = 0.5
"""Columns are read by themselves if they are at most this share of the file's bytes."""


def read_columns(run: Run, artifact: Artifact, name: str, manifest: Manifest, columns: Sequence[str]) -> pa.Table:
    """These columns of a finished artifact's file, verified by their pages' checksums or with the whole file.

    Raises CorruptArtifact naming the file.
    """
    if (table := _columns_alone(run, f"{artifact}/{name}", manifest.files[name].bytes, columns)) is not None:
        return table
    return read_parquet(run.read(artifact, name, manifest), f"{run.url}/{artifact}/{name}", list(columns))


def _columns_alone(run: Run, key: str, size: int, columns: Sequence[str]) -> pa.Table | None:
    """The columns, read by themselves. None if that isn't worth it, pages lack checksums, or anything is wrong.

    The caller then reads the whole file, which reports what is wrong.
    """
    if size <= WHOLE_BYTES:
        return None
    footer = range(size - FOOTER_BYTES, size)
    try:
        [end] = run.store.read_parts(key, [footer])
        if (spans := _spans(pq.read_metadata(pa.BufferReader(end)), columns)) is None:
            return None
        if sum(map(len, spans)) > WORTH * size:
            return None
        file = np.zeros(size, np.uint8)  # pages that are never written take no memory
        for span, data in zip((footer, *spans), (end, *run.store.read_parts(key, spans)), strict=True):
            file[span.start : span.stop] = np.frombuffer(data, np.uint8)
        return pq.read_table(pa.BufferReader(file), columns=list(columns), page_checksum_verification=True)
    except (pa.ArrowException, OSError, ValueError, StorageError):
        return None


def _spans(metadata: pq.FileMetaData, columns: Sequence[str]) -> list[range] | None:
    """The byte ranges of columns, adjacent ones merged; None if the file's pages have no checksums."""
    if CHECKED_PAGES not in (metadata.metadata or {}):
        return None
    spans: list[range] = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(metadata.num_columns)):
            if column.path_in_schema not in columns:
                continue
            begin = column.data_page_offset
            if spans and spans[-1].stop == begin:
                begin = spans.pop().start
            spans.append(range(begin, column.data_page_offset + column.total_compressed_size))
    return spans
