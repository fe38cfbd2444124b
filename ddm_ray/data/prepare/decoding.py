"""Decodes a source's chunks: usable rows as pixels, others with a reason. Without Ray and torch.

N rows of a chunk, C channels, H x W pixels.
"""

from collections.abc import Container, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ddm_ray.config import DataConfig
from ddm_ray.core.names import FitName
from ddm_ray.data.images import thumbnail
from ddm_ray.data.order import holdout_fractions
from ddm_ray.data.prepare.decoder_process import Answer, decode_apart
from ddm_ray.data.schema import middle
from ddm_ray.data.sharded.work import Chunk
from ddm_ray.data.sources import Encoded, Source, Unit
from ddm_ray.run.manifest import sha256

BATCH_ROWS, BATCH_BYTES = 64, 4 * 2**20
"""Maximum rows, and encoded bytes, per question to the decoding process."""


@dataclass(frozen=True)
class DecodedRows:
    """A chunk's usable rows: hex SHA-256 of files, labels or captions, uint8 pixels; and {id, reason} of the others.

    `losses`: {id, reason} of usable rows that lost something. `scenes`: each row's holdout group; None: its id.
    `thumbnails`: JPEGs, if the rows' data will be latents.
    """

    ids: list[str]
    content_hashes: list[str]
    conditions: list[int] | list[str]
    pixels_NHWC: np.ndarray
    rejected: list[dict[str, str]]
    losses: list[dict[str, str]] = field(default_factory=list)
    scenes: list[str] | None = None
    thumbnails: list[bytes] | None = None

    def holdout_fractions(self) -> np.ndarray:
        """fraction_N float64 in [0, 1): rows with a fraction below `data.heldout` are held out."""
        return holdout_fractions(self.ids if self.scenes is None else self.scenes)


def decode_rows(rows: list[Encoded], config: DataConfig, pool: Executor | None = None) -> DecodedRows:
    """Decode rows, with the threads of `pool` if it is given; the result is the same. Raises as `decode_apart`."""
    channels, height, width = config.decoded_shape
    pixels_NHWC = np.empty((len(rows), height, width, channels), np.uint8)
    batches = list(_batches(rows))
    decode_batch = partial(_decode, rows, pixels_NHWC, config.fit)
    decoded = pool.map(decode_batch, batches) if pool else map(decode_batch, batches)
    answers = [answer for batch in decoded for answer in batch]
    both = list(zip(rows, answers, strict=True))
    usable = [place for place, answer in enumerate(answers) if not answer.reason]
    conditions: list[Any] = [rows[place].condition for place in usable]
    pixels_NHWC = pixels_NHWC if len(usable) == len(rows) else pixels_NHWC[usable]
    # Made here, since many processes decode, but only one embeds.
    thumbnails = None if config.latents is None else list((pool.map if pool else map)(thumbnail, pixels_NHWC))
    return DecodedRows(
        ids=[rows[place].id for place in usable],
        content_hashes=[sha256(rows[place].image or b"") for place in usable],
        conditions=conditions,
        pixels_NHWC=pixels_NHWC,
        rejected=[{"id": row.id, "reason": each.reason} for row, each in both if each.reason],
        losses=[{"id": row.id, "reason": why} for row, each in both for why in (each.remark, row.remark) if why],
        scenes=[rows[place].scene or rows[place].id for place in usable],
        thumbnails=thumbnails,
    )


def _batches(rows: list[Encoded]) -> Iterator[range]:
    """Ranges of at most BATCH_ROWS rows that end once their images reach BATCH_BYTES."""
    start, total = 0, 0
    for place, row in enumerate(rows, 1):
        total += len(row.image or b"")
        if place - start == BATCH_ROWS or total >= BATCH_BYTES or place == len(rows):
            yield range(start, place)
            start, total = place, 0


def middle_pixels(pixels_NHWC: np.ndarray, config: DataConfig) -> np.ndarray:
    """Images as embedders see them, contiguous: without the margin for crops."""
    middle_NCHW = middle(pixels_NHWC.transpose(0, 3, 1, 2), config.crop_margin)
    return np.ascontiguousarray(middle_NCHW.transpose(0, 2, 3, 1))


def _decode(rows: list[Encoded], pixels_NHWC: np.ndarray, fit: FitName, batch: range) -> list[Answer]:
    """Decode a batch into its places. Returns the answer for each row."""
    answers = {place: Answer(problem) for place in batch if (problem := rows[place].problem) is not None}
    asked = [place for place in batch if place not in answers]
    images = [rows[place].image or b"" for place in asked]
    answers |= zip(asked, decode_apart(images, [pixels_NHWC[place] for place in asked], fit), strict=True)
    return [answers[place] for place in batch]


def read_decoded(unit: Unit, skip: Container[int], source: Source, config: DataConfig) -> Iterator[Chunk[DecodedRows]]:
    """Decode a unit's missing chunks. With all arguments but the first two bound, it is a `ReadUnit`."""
    for chunk in source.read(unit, skip):
        number, until, decoded = chunk.number, chunk.until, decode_rows(chunk.rows, config)
        del chunk  # otherwise its files stay in memory until the next chunk is read
        yield Chunk(number, decoded, until)
