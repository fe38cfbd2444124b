"""A decoded chunk's way to a finished part, and the embedder that is fitted to the source's own pixels. No Ray."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from ddm_ray.config import DataConfig, RunConfig
from ddm_ray.data.decoding import DONE, decode_rows, failed, unpack
from ddm_ray.data.embed import Embed
from ddm_ray.data.order import places, ranks
from ddm_ray.data.parts import NULL, Parts, Plan
from ddm_ray.data.sources import Encoded, Source
from ddm_ray.errors import DataError, DDMError
from ddm_ray.models.features import PixelFeatures
from ddm_ray.storage.records import Place
from ddm_ray.storage.run import Run

PCA_ROWS = 10_000
PCA_BYTES = 2**29
PIXELS = "_embedder/PIXELS.json"


class FinishChunks:
    """Embeds decoded chunks and writes their parts; networks are loaded once, while the first chunk is decoded.

    Calls may overlap: one chunk is written while the next is embedded.
    """

    def __init__(self, run: Run, artifact: str, device: str):
        self._parts = Parts(run, artifact)
        self._config, self._device = run.config, device
        self._thread = ThreadPoolExecutor(1)  # has the networks: loads them, then embeds one chunk at a time
        self._embed = self._thread.submit(self._load)

    def __call__(self, chunks: pa.Table) -> pa.Table:
        """Rows of `read_units` -> their records' names, or errors. A chunk that has a record is left alone."""
        return pa.concat_tables([self._finish(chunks.slice(row, 1)) for row in range(chunks.num_rows)])

    def _finish(self, row: pa.Table) -> pa.Table:
        if row["record"][0].is_valid:
            place = Place.parse(row["record"][0].as_py())
            assert place is not None
            try:
                if not self._parts.has(place):
                    self._make(place, row)
            except DDMError as error:
                return failed(error)
        return row.select(DONE.names)

    def _make(self, place: Place, row: pa.Table) -> None:
        found = unpack(row, self._config.data)
        embed = self._embed.result()
        rows = self._thread.submit(embed, found).result()
        self._parts.write(place, rows.table, embed.embedding_dim, rows.rejected)

    def _load(self) -> Embed:
        embed = Embed(self._config, fitted(self._parts), self._device)
        if (text := embed.null_text()) is not None:
            self._parts.settle(NULL, ".safetensors", lambda: (text, {}))
        return embed


def embeds_pixels(config: RunConfig) -> bool:
    """Whether the embedder is fitted to the run's own pixels."""
    return config.partition.method != "given" and config.embedder.kind == "pixels"


def fitted(parts: Parts) -> PixelFeatures | None:
    """The principal components that `fit` made; None for an embedder that isn't fitted. Raises CorruptArtifact."""
    if not embeds_pixels(parts.run.config):
        return None
    return PixelFeatures.from_bytes(parts.settled(PIXELS, ".safetensors"), f"{parts.url}/{PIXELS}")


def fit(parts: Parts, plan: Plan, source: Source) -> None:
    """Fit the embedder of pixels once for all, on training rows among the first PCA_ROWS of units in random order.

    They are fewer where these would take more than PCA_BYTES as float32. Which rows and in which order depends on the
    plan alone. Raises DataError if they don't allow it.
    """
    config = parts.run.config
    if not embeds_pixels(config):
        return

    def components() -> tuple[bytes, dict[str, str]]:
        ids, pixels_NHWC = _sample(plan, source, config.data)
        order = np.argsort(ids, kind="stable")
        return PixelFeatures.fit(pixels_NHWC[order], config.embedder.dim).to_bytes(), {}

    parts.settle(PIXELS, ".safetensors", components)


def _sample(plan: Plan, source: Source, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    ids: list[str] = []
    pixels: list[np.ndarray] = []
    seen = 0
    bad: list[dict[str, str]] = []
    for rows in _chunks_of_units_in_random_order(plan, source):
        decoded = decode_rows(rows, config)
        train_N = places(decoded.ids) >= config.heldout
        ids += [row_id for row_id, train in zip(decoded.ids, train_N, strict=True) if train]
        pixels.append(decoded.pixels_NHWC[train_N])
        seen, bad = seen + len(rows), bad + decoded.rejected
        if seen >= min(PCA_ROWS, PCA_BYTES // (4 * math.prod(config.pixel_shape))):
            break
    if not ids:
        example = f": {len(bad)} of {seen} can't be used, e.g. {bad[0]['id']} ({bad[0]['reason']})" if bad else ""
        raise DataError(f"source {plan.source} gave no row to train on{example}; data.heldout is {config.heldout}")
    return np.array(ids), np.concatenate(pixels)


def _chunks_of_units_in_random_order(plan: Plan, source: Source) -> Iterator[list[Encoded]]:
    for number in np.argsort(ranks(str(number) for number in range(len(plan.units)))):
        for chunk in source.read(plan.units[number]):
            yield chunk.rows
