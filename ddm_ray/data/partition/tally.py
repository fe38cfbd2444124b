"""Exact counts of training rows by label, and of their data by value; independent of the order of rows."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from ddm_ray.config import DataConfig
from ddm_ray.data.schema import array, as_modelled, data_dtype


@dataclass
class Tally:
    """`counts_C`: rows by label, empty for texts. `values_V`: data values by their bit pattern, V = 2^8 or 2^16."""

    dtype: np.dtype
    counts_C: np.ndarray
    values_V: np.ndarray

    @classmethod
    def none(cls, config: DataConfig) -> Self:
        """The tally of zero rows."""
        dtype = data_dtype(config)
        values_V = np.zeros(2 ** (8 * dtype.itemsize), np.int64)
        return cls(dtype, np.zeros(len(config.class_names), np.int64), values_V)

    @property
    def _bits(self) -> np.dtype:
        return np.dtype(f"<u{self.dtype.itemsize}")

    def add(self, table: pa.Table) -> None:
        """Count the rows of a table."""
        bits = array(table["data"], self._bits).ravel()
        self.values_V += np.bincount(bits, minlength=len(self.values_V))
        if len(self.counts_C):
            self.counts_C += np.bincount(table["label"].to_numpy(), minlength=len(self.counts_C))

    def join(self, other: "Tally") -> None:
        """Add the counts of another tally."""
        self.counts_C += other.counts_C
        self.values_V += other.values_V

    def std(self) -> float:
        """Standard deviation of the modelled data."""
        present = np.flatnonzero(self.values_V)
        values = as_modelled(present.astype(self._bits).view(self.dtype)).astype(np.float64)
        if not len(present):
            return 0.0
        weights = self.values_V[present] / self.values_V.sum()
        return float(np.sqrt(weights @ (values - weights @ values) ** 2))
