"""Rows in memory as shards store them, and the views of them that training uses.

N rows, M of them in one part, C channels, H x W pixels or latents, P channels of a pooled text.
"""

import numpy as np
import pyarrow as pa
import torch

from ddm_ray.config import DataConfig
from ddm_ray.core.augmentation import Views
from ddm_ray.core.condition import Condition, TextIds
from ddm_ray.data.schema import MIRRORED, TEXT, array, as_modelled, data_dtype, middle
from ddm_ray.data.texts import read_ids, texts


class StoredRows:
    """A fixed number of rows as shards store them, filled and read part by part."""

    def __init__(self, config: DataConfig, num_rows: int):
        self._config, self.num_rows = config, num_rows
        self._has_ids = config.text is not None and config.text.stored == "ids"
        self.data_NCHW = np.empty((num_rows, *config.stored_shape), data_dtype(config))
        self._mirrored_NCHW = np.empty_like(self.data_NCHW) if config.stores_mirrored else None
        self.cluster_N = np.empty(num_rows, np.int64)
        self._label_N = np.empty(num_rows if config.text is None else 0, np.int64)
        self._tokens: list[bytes] = [] if config.text is None else [b""] * num_rows
        pooled = None if config.text is None or self._has_ids else config.text.pooled_dim
        self._pooled_NP = None if pooled is None else np.empty((num_rows, pooled), TEXT)
        # Ids of the pooled vector's own encoder, if texts are stored as ids.
        own_ids = config.text is not None and self._has_ids and config.text.pooled_encoder is not None
        self._pooled_ids: list[bytes] | None = [b""] * num_rows if own_ids else None

    def fill(self, first: int, table: pa.Table, cluster: int | np.ndarray) -> None:
        """Set the rows from `first` on to those of a table of `shard_schema`."""
        rows = slice(first, first + table.num_rows)
        self.data_NCHW[rows] = array(table["data"], self.data_NCHW.dtype, self._config.stored_shape)
        if self._mirrored_NCHW is not None:
            self._mirrored_NCHW[rows] = array(table[MIRRORED], self.data_NCHW.dtype, self._config.shape)
        self.cluster_N[rows] = cluster
        if self._config.text is None:
            self._label_N[rows] = table["label"].to_numpy()
            return
        self._tokens[rows] = table["text_tokens"].to_pylist()
        if self._pooled_ids is not None:
            self._pooled_ids[rows] = table["text_pooled"].to_pylist()
        if self._pooled_NP is not None:
            self._pooled_NP[rows] = array(table["text_pooled"], TEXT)

    def take(self, member_M: np.ndarray, other: "StoredRows", row_M: np.ndarray) -> None:
        """Set rows member_M to rows row_M of another instance."""
        self.data_NCHW[member_M] = other.data_NCHW[row_M]
        if self._mirrored_NCHW is not None and other._mirrored_NCHW is not None:
            self._mirrored_NCHW[member_M] = other._mirrored_NCHW[row_M]
        self.cluster_N[member_M] = other.cluster_N[row_M]
        if self._config.text is None:
            self._label_N[member_M] = other._label_N[row_M]
            return
        for member, row in zip(member_M.tolist(), row_M.tolist(), strict=True):
            self._tokens[member] = other._tokens[row]
            if self._pooled_ids is not None and other._pooled_ids is not None:
                self._pooled_ids[member] = other._pooled_ids[row]
        if self._pooled_NP is not None and other._pooled_NP is not None:
            self._pooled_NP[member_M] = other._pooled_NP[row_M]

    def part(self, row_M: np.ndarray) -> "StoredRows":
        """A copy of rows row_M."""
        part = StoredRows(self._config, len(row_M))
        part.take(np.arange(len(row_M)), self, row_M)
        return part

    def condition(self) -> Condition | TextIds:
        """label_N int64, or texts padded to `data.text.tokens` tokens: float32, or ids that are still to be encoded."""
        if self._config.text is None:
            return torch.from_numpy(self._label_N)
        if self._has_ids:
            return read_ids(self._tokens, self._pooled_ids, self._config.text)
        return texts(self._tokens, self._pooled_NP, self._config.text)

    def modelled(self, views: Views | None = None) -> np.ndarray:
        """data_NCHW float32 as the networks see it, each row in its view; None: the middle crop, not mirrored."""
        if views is None:
            return as_modelled(middle(self.data_NCHW, self._config.crop_margin))
        _, height, width = self._config.shape
        mirrored_N, corner_N2 = views.mirrored_B.numpy(), views.corner_B2.tolist()
        viewed_NCHW = np.empty((len(self.data_NCHW), *self._config.shape), self.data_NCHW.dtype)
        for row, (top, left) in enumerate(corner_N2):
            viewed_NCHW[row] = self.data_NCHW[row, :, top : top + height, left : left + width]
        if self._mirrored_NCHW is None:
            viewed_NCHW[mirrored_N] = viewed_NCHW[mirrored_N, ..., ::-1]
        else:
            viewed_NCHW[mirrored_N] = self._mirrored_NCHW[mirrored_N]
        return as_modelled(viewed_NCHW)
