"""A chunk read and decoded: usable rows as pixels, the others with a reason. No Ray, no torch.

On its way a chunk is one row of an Arrow table, so that nothing splits it or joins it to another.
N rows of a chunk, C channels, H x W pixels.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ddm_ray import errors
from ddm_ray.config import DataConfig
from ddm_ray.data.images import DECODER_ERRORS, decode, rejection
from ddm_ray.data.sources import Encoded, Source, Unit
from ddm_ray.errors import DDMError
from ddm_ray.storage.manifest import sha256
from ddm_ray.storage.records import Place

_STRINGS = pa.list_(pa.string())
# Our own errors come back as results: Ray would wrap an exception, log it, and forget its cause.
DONE = pa.schema([("record", pa.string()), ("until", pa.float64()), ("error", _STRINGS)])


@dataclass(frozen=True)
class DecodedRows:
    """A chunk's usable rows: hex SHA-256 of files, labels or captions, uint8 pixels; {id, reason} of the others."""

    ids: list[str]
    content_hashes: list[str]
    conditions: list[int] | list[str]
    pixels_NHWC: np.ndarray
    rejected: list[dict[str, str]]


def decode_rows(rows: list[Encoded], config: DataConfig) -> DecodedRows:
    """Decode what can be decoded."""
    channels, height, width = config.pixel_shape
    pixels_NHWC = np.empty((len(rows), height, width, channels), np.uint8)
    used: list[Encoded] = []
    hashes: list[str] = []
    rejected: list[dict[str, str]] = []
    for row in rows:
        if row.problem is not None:
            rejected.append({"id": row.id, "reason": row.problem})
            continue
        try:
            pixels_NHWC[len(used)] = decode(row.image, config.pixel_shape)
        except DECODER_ERRORS as error:
            rejected.append({"id": row.id, "reason": rejection(error)})
            continue
        assert row.image is not None
        used.append(row)
        hashes.append(sha256(row.image))
    conditions: list[Any] = [row.condition for row in used]
    return DecodedRows([row.id for row in used], hashes, conditions, pixels_NHWC[: len(used)], rejected)


def read_units(units: pa.Table, source: Source, config: DataConfig) -> Iterator[pa.Table]:
    """Rows of `as_task` -> their units' missing chunks, decoded, each as a table of one row.

    A DDMError ends them, as such a row. Equal arguments give equal tables, so that a lost one can be made again.
    """
    try:
        for task in units.to_pylist():
            fields = json.loads(task["unit"])
            unit = Unit(**{**fields, "files": tuple(fields["files"]), "sizes": tuple(fields["sizes"])})
            for chunk in source.read(unit, frozenset(task["skip"])):
                place = Place(task["number"], chunk.number, chunk.until == 1.0)
                yield _pack(place, chunk.until, decode_rows(chunk.rows, config), config)
    except DDMError as error:
        yield failed(error)


def as_task(number: int, unit: Unit, skip: Collection[int]) -> dict[str, Any]:
    """A unit and the chunks of it that are finished, as a row."""
    return {"number": number, "unit": json.dumps(asdict(unit)), "skip": sorted(skip)}


def _pack(place: Place, until: float, decoded: DecodedRows, config: DataConfig) -> pa.Table:
    condition = pa.string() if config.text is not None else pa.int64()
    offsets = pa.py_buffer(np.array([0, decoded.pixels_NHWC.nbytes], np.int64))
    pixels = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(decoded.pixels_NHWC)])
    columns = {
        "record": pa.array([place.name]),
        "until": pa.array([until]),
        "error": pa.array([None], _STRINGS),
        "ids": pa.array([decoded.ids], _STRINGS),
        "content_hashes": pa.array([decoded.content_hashes], _STRINGS),
        "conditions": pa.array([decoded.conditions], pa.list_(condition)),
        "pixels": pixels,
        "rejected": pa.array([json.dumps(decoded.rejected)]),
    }
    return pa.table(columns)


def unpack(row: pa.Table, config: DataConfig) -> DecodedRows:
    """The decoded chunk in a table of one row; pixels aren't copied."""
    channels, height, width = config.pixel_shape
    columns = ("ids", "content_hashes", "conditions", "rejected")
    ids, hashes, conditions, rejected = (row[name][0].as_py() for name in columns)
    pixels = np.frombuffer(row["pixels"][0].as_buffer(), np.uint8).reshape(len(ids), height, width, channels)
    return DecodedRows(ids, hashes, conditions, pixels, json.loads(rejected))


def failed(error: DDMError) -> pa.Table:
    """An error in place of a chunk, as `raise_failed` raises it again."""
    return pa.table({"record": [None], "until": [0.0], "error": [[type(error).__name__, str(error)]]}, schema=DONE)


def raise_failed(found: list[str] | None) -> None:
    """Raise the DDMError that came back in a chunk's column `error`, if any."""
    if found is not None:
        name, message = found
        raise getattr(errors, name)(message)
