"""A source's chunks decoded: usable rows as pixels, the others with a reason. No Ray, no torch.

N rows of a chunk, C channels, H x W pixels.
"""

from collections.abc import Container, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ddm_ray.config import DataConfig
from ddm_ray.data.images import DECODER_ERRORS, decode, rejection
from ddm_ray.data.sharded.work import Chunk
from ddm_ray.data.sources import Encoded, Source, Unit
from ddm_ray.storage.manifest import sha256


@dataclass(frozen=True)
class DecodedRows:
    """A chunk's usable rows: hex SHA-256 of files, labels or captions, uint8 pixels; {id, reason} of the others."""

    ids: list[str]
    content_hashes: list[str]
    conditions: list[int] | list[str]
    pixels_NHWC: np.ndarray
    rejected: list[dict[str, str]]


def decode_rows(rows: list[Encoded], config: DataConfig, pool: Executor | None = None) -> DecodedRows:
    """Decode rows, in the threads of `pool` if there is one; the result is the same."""
    channels, height, width = config.pixel_shape
    pixels_NHWC = np.empty((len(rows), height, width, channels), np.uint8)
    usable: list[Encoded] = []
    hashes: list[str] = []
    rejected: list[dict[str, str]] = []
    decode_one = partial(_decode, config=config)
    decoded: Iterable[tuple[np.ndarray, str] | str] = pool.map(decode_one, rows) if pool else map(decode_one, rows)
    for row, result in zip(rows, decoded, strict=True):
        if isinstance(result, str):
            rejected.append({"id": row.id, "reason": result})
            continue
        pixels_NHWC[len(usable)], content_hash = result
        usable.append(row)
        hashes.append(content_hash)
    conditions: list[Any] = [row.condition for row in usable]
    return DecodedRows([row.id for row in usable], hashes, conditions, pixels_NHWC[: len(usable)], rejected)


def _decode(row: Encoded, config: DataConfig) -> tuple[np.ndarray, str] | str:
    """A row's pixels_HWC and hex SHA-256; or the reason why it can't be used."""
    if row.problem is not None:
        return row.problem
    try:
        pixels_HWC = decode(row.image, config.pixel_shape)
    except DECODER_ERRORS as error:
        return rejection(error)
    assert row.image is not None
    return pixels_HWC, sha256(row.image)


def read_decoded(unit: Unit, skip: Container[int], source: Source, config: DataConfig) -> Iterator[Chunk[DecodedRows]]:
    """A unit's missing chunks, decoded; once source and config are bound, a `ReadUnit`."""
    for chunk in source.read(unit, skip):
        yield Chunk(chunk.number, decode_rows(chunk.rows, config), chunk.until)
