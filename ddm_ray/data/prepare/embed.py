"""Decoded images and their conditions -> rows: embeddings, latents, encoded texts. Without Ray.

Shapes: N rows, C channels, H x W pixels or latents, D dimensions of an embedding, P channels of a pooled text.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ddm_ray.config import RunConfig
from ddm_ray.data.prepare.decoding import DecodedRows, middle_pixels
from ddm_ray.data.prepare.records import EmbeddedRows
from ddm_ray.data.schema import EMBEDDING, HELDOUT, MIRRORED, TEXT, TRAIN, column, data_dtype, rows_schema
from ddm_ray.models.embedders import Embedder, PixelEmbedder, make_embedder

if TYPE_CHECKING:
    from ddm_ray.data.prepare.encode import EncodeImages, EncodeTexts


class Embed:
    """`DecodedRows` -> `EmbeddedRows`. Loads the networks once; they see `embedder.batch_size` rows at a time."""

    def __init__(self, config: RunConfig, pixel_embedder: PixelEmbedder | None, device: str = "cpu"):
        """`pixel_embedder`: the fitted one if the run embeds pixels, else None.

        Raises ConfigError, DataError, CorruptArtifact if a network can't be loaded, or its sizes aren't the run's.
        """
        self.config = config
        data, given = config.data, config.partition.given
        self._embedder: Embedder | None = None if given else make_embedder(config.embedder, pixel_embedder, device)
        self._images: EncodeImages | None = None
        self._texts: EncodeTexts | None = None
        if data.latents is not None or data.text is not None:
            self._load_encoders(device)

    def _load_encoders(self, device: str) -> None:
        from ddm_ray.data.prepare import encode  # imports torch, which rows of pixels and labels don't need

        data, size = self.config.data, self.config.embedder.batch_size
        if data.text is not None:
            self._texts = encode.EncodeTexts(data.text, size, device)
        if data.latents is not None:
            self._images = encode.EncodeImages(data.latents, data.channels, size, device)

    @property
    def embedding_dim(self) -> int:
        """D; 0 if shards are given, since nothing is clustered."""
        return 0 if self._embedder is None else self._embedder.dim

    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the networks by their role in a run: embedder, autoencoder, text encoder."""
        parts = {
            "embedder": self._embedder.fingerprint if self._embedder else "",
            "autoencoder": self._images.fingerprint() if self._images else "",
            "text encoder": self._texts.fingerprint() if self._texts else "",
        }
        return {part: fingerprint for part, fingerprint in parts.items() if fingerprint}

    def null_text(self) -> bytes | None:
        """The file of the empty prompt's text (`texts.null_text_bytes`); None unless conditions are texts."""
        return None if self._texts is None else self._texts.null_text()

    def __call__(self, decoded: DecodedRows) -> EmbeddedRows:
        """The rows, in the same order; rejected are also those for which a network gives NaN or infinity."""
        data, schema = self.config.data, rows_schema(self.config.data, self.embedding_dim)
        if not decoded.ids:
            return EmbeddedRows(schema.empty_table(), decoded.rejected)
        cuts = self._texts.cuts(list(map(str, decoded.conditions))) if self._texts else []
        cut_off = [(row, f"a caption {cut[0]} is cut off") for row, cut in zip(decoded.ids, cuts, strict=False) if cut]
        losses = decoded.losses + [{"id": row, "reason": reason} for row, reason in cut_off]
        assert decoded.pixels_NHWC.dtype == np.uint8
        channels, height, width = data.decoded_shape
        assert decoded.pixels_NHWC.shape == (len(decoded.ids), height, width, channels)
        numbers = _Numbers(decoded.ids)
        columns: dict[str, Any] = {
            "id": decoded.ids,
            "content_hash": decoded.content_hashes,
            "split": [HELDOUT if fraction < data.heldout else TRAIN for fraction in decoded.holdout_fractions()],
            **self._data(decoded, numbers),
            **self._conditions(decoded, numbers),
        }
        if self._embedder is not None:
            embeddings_ND = self._embedder(middle_pixels(decoded.pixels_NHWC, data))
            kind = self.config.embedder.kind
            name = kind if kind == "pixels" else f"{kind} {self.config.embedder.network}"
            numbers.check(embeddings_ND, f"embedder {name}")
            columns["embedding"] = column(embeddings_ND, EMBEDDING)
        table, rejected = numbers.split(pa.table(columns, schema=schema))
        return EmbeddedRows(table, decoded.rejected + rejected, losses)

    def _data(self, decoded: DecodedRows, numbers: "_Numbers") -> dict[str, Any]:
        config = self.config.data
        if self._images is None:
            return {"data": column(decoded.pixels_NHWC.transpose(0, 3, 1, 2), data_dtype(config))}
        assert config.latents is not None
        latents_NCHW = self._images(decoded.pixels_NHWC)
        assert latents_NCHW.shape[1:] == config.shape
        numbers.check(latents_NCHW, f"autoencoder {config.latents.autoencoder}")
        columns: dict[str, Any] = {
            "data": column(latents_NCHW, data_dtype(config)),
            "thumbnail": decoded.thumbnails,
        }
        if config.stores_mirrored:
            mirrored_NCHW = self._images(np.ascontiguousarray(decoded.pixels_NHWC[:, :, ::-1]))
            numbers.check(mirrored_NCHW, f"autoencoder {config.latents.autoencoder}")
            columns[MIRRORED] = column(mirrored_NCHW, data_dtype(config))
        return columns

    def _conditions(self, decoded: DecodedRows, numbers: "_Numbers") -> dict[str, Any]:
        config = self.config.data.text
        if config is None or self._texts is None:
            return {"label": decoded.conditions}
        captions = [str(caption) for caption in decoded.conditions]
        tokens, pooled = self._texts(captions)
        columns: dict[str, Any] = {"text": captions, "text_tokens": tokens}
        if config.stored == "ids":
            return columns if pooled is None else columns | {"text_pooled": pooled}
        finite_N = np.array([np.isfinite(np.frombuffer(stored, TEXT)).all() for stored in tokens])
        numbers.reject(~finite_N, f"text encoder {config.encoder}", TEXT)
        if pooled is not None:
            pooled_NP = np.asarray(pooled)
            numbers.check(pooled_NP, f"text encoder {config.pooled_encoder or config.encoder}")
            columns["text_pooled"] = column(pooled_NP, TEXT)
        return columns


class _Numbers:
    """Collects the rows for which every network gives finite numbers, and the reasons why others are rejected."""

    def __init__(self, ids: list[str]):
        self._ids = ids
        self._reasons: dict[int, str] = {}

    def check(self, values: np.ndarray, what: str) -> None:
        """Reject rows for which network `what` gives values (N, ...) that aren't finite."""
        self.reject(~np.isfinite(values.reshape(len(values), -1)).all(axis=1), what, values.dtype)

    def reject(self, broken_N: np.ndarray, what: str, dtype: np.dtype) -> None:
        """Reject rows for which network `what` gives values of this type that aren't finite."""
        limit = ", or more than float16 holds" if dtype == np.float16 else ""
        for row in np.flatnonzero(broken_N).tolist():
            self._reasons.setdefault(row, f"{what}: gives NaN or infinity{limit}")

    def split(self, table: pa.Table) -> tuple[pa.Table, list[dict[str, str]]]:
        """The usable rows, and {id, reason} of the rejected ones."""
        if not self._reasons:
            return table, []
        usable_N = np.array([row not in self._reasons for row in range(table.num_rows)])
        rejected = [{"id": self._ids[row], "reason": self._reasons[row]} for row in sorted(self._reasons)]
        return table.filter(pa.array(usable_N)).combine_chunks(), rejected
