"""Fits the pixel embedder, once, to the source's own pixels. Without Ray."""

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ddm_ray.config import DataConfig, RunConfig
from ddm_ray.data import OnProgress
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.prepare.decoder_process import MAX_SIDE_BY_SIDE
from ddm_ray.data.prepare.decoding import decode_rows, middle_pixels
from ddm_ray.data.prepare.records import RowsStore, SourcePlan
from ddm_ray.data.sources import EncodedChunk, Source
from ddm_ray.errors import DataError
from ddm_ray.models.embedders import PixelEmbedder

PCA_ROWS = 10_000
PCA_BYTES = 2**29
PIXELS = "_embedder/PIXELS.json"


def embeds_pixels(config: RunConfig) -> bool:
    """True if the embedder is fitted to the run's own pixels."""
    return not config.partition.given and config.embedder.kind == "pixels"


def fitted(chunks: RowsStore) -> PixelEmbedder | None:
    """The components that `fit_embedder` found; None for an embedder that isn't fitted. Raises CorruptArtifact."""
    if not embeds_pixels(chunks.run.config):
        return None
    return PixelEmbedder.from_bytes(chunks.read_once(PIXELS)[0], f"{chunks.url}/{PIXELS}")


def fit_embedder(chunks: RowsStore, plan: SourcePlan, source: Source, on_progress: OnProgress) -> None:
    """Fit the pixel embedder, once, to training rows among the first PCA_ROWS rows of units in random order.

    There are fewer rows if these would take more than PCA_BYTES as float32. The rows and their order depend only on
    the plan. Raises DataError if there are too few.
    """
    config = chunks.run.config
    if not embeds_pixels(config):
        return

    def components() -> tuple[bytes, dict[str, str]]:
        ids, pixels_NHWC = _sample(plan, source, config.data, on_progress)
        on_progress(0.0, f"fitting the embedder to {len(ids):,} images")
        order = np.argsort(np.array(ids), kind="stable")
        return PixelEmbedder.fit(pixels_NHWC[order], config.embedder.dim).to_bytes(), {}

    chunks.write_once(PIXELS, ".safetensors", components)


def _sample(
    plan: SourcePlan, source: Source, config: DataConfig, on_progress: OnProgress
) -> tuple[list[str], np.ndarray]:
    """Ids and pixels_NHWC of training rows."""
    ids: list[str] = []
    pixels: list[np.ndarray] = []
    rejected: list[dict[str, str]] = []
    num_read, enough = 0, min(PCA_ROWS, PCA_BYTES // (4 * math.prod(config.pixel_shape)))
    with ThreadPoolExecutor(min(MAX_SIDE_BY_SIDE, os.cpu_count() or 1)) as pool:
        for chunk in _chunks_in_random_order(plan, source):
            decoded = decode_rows(chunk.rows, config, pool)
            train_N = decoded.holdout_fractions() >= config.heldout
            ids += [row_id for row_id, train in zip(decoded.ids, train_N, strict=True) if train]
            pixels.append(middle_pixels(decoded.pixels_NHWC[train_N], config))
            num_read, rejected = num_read + len(chunk.rows), rejected + decoded.rejected
            on_progress(0.0, f"fitting the embedder: {num_read:,} of at most {enough:,} images read")
            if num_read >= enough:
                break
    if not ids:
        example = ""
        if rejected:
            first = f"{rejected[0]['id']} ({rejected[0]['reason']})"
            example = f": {len(rejected)} of {num_read} can't be used, e.g. {first}"
        raise DataError(f"source {plan.source} gave no row to train on{example}; data.heldout is {config.heldout}")
    return ids, np.concatenate(pixels)


def _chunks_in_random_order(plan: SourcePlan, source: Source) -> Iterator[EncodedChunk]:
    """Yield the chunks of units in random order."""
    for number in np.argsort(shuffle_keys(str(number) for number in range(len(plan.units)))):
        yield from source.read(plan.units[number])
