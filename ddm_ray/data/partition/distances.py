"""Distances of rows from the centroids of their clusters, counted in bins: what rows that come later are compared with.

N rows, K clusters, B bins.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, PositiveInt, ValidationError, model_validator

from ddm_ray.errors import CorruptArtifact
from ddm_ray.parsing import parse_object
from ddm_ray.remedies import Fix
from ddm_ray.storage.info import Count, Finite, Info
from ddm_ray.storage.sealed import canonical

FILE = "distances.json"
"""Name of the file in a partition's report that holds them."""
CLUSTER_BYTES = 2**18
"""Bytes that a cluster has in that file at most."""
PRECISION = 2**-7
"""Width of a bin as a share of its distances: a percentile is at most so much too high, a mean half of it off."""
LEAST, MOST = 2.0**-32, 2.0**32
"""Distances below and above which all are in one bin."""
# A bin is what a float's first bits say, its exponent and 7 bits of its mantissa: the last 16 are left out.
_SHIFT = 16
_FIRST, _LAST = (int(np.float32(edge).view(np.uint32)) >> _SHIFT for edge in (LEAST, MOST))
_NUM = _LAST - _FIRST + 1


class Distances:
    """Distances of rows by cluster, of all rows or as many as were `measured`: the same in whatever order they come.

    64 KiB of memory a cluster.
    """

    def __init__(self, num_clusters: int):
        self.measured = 0
        self._most_K = np.zeros(num_clusters, np.float32)
        self._rows_KB = np.zeros((num_clusters, _NUM), np.int64)

    def add(self, cluster_N: np.ndarray, distance_N: np.ndarray) -> None:
        """Count rows: the cluster of each, and its distance."""
        distance_N = np.minimum(distance_N, MOST).astype(np.float32)
        self.measured += len(distance_N)
        np.maximum.at(self._most_K, cluster_N, distance_N)
        bin_N = (np.maximum(distance_N, np.float32(LEAST)).view(np.uint32) >> _SHIFT) - _FIRST
        np.add.at(self._rows_KB, (cluster_N, bin_N), 1)

    def __getstate__(self) -> tuple[Any, ...]:
        bins = np.flatnonzero(self._rows_KB)  # few bins have rows
        return self.measured, self._most_K, bins, self._rows_KB.ravel()[bins]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.measured, most_K, bins, rows = state
        self._most_K = most_K.copy()
        self._rows_KB = np.zeros((len(self._most_K), _NUM), np.int64)
        self._rows_KB.ravel()[bins] = rows

    def joined(self, other: "Distances") -> "Distances":
        """These and others."""
        both = Distances(len(self._most_K))
        both.measured = self.measured + other.measured
        both._most_K = np.maximum(self._most_K, other._most_K)
        both._rows_KB = self._rows_KB + other._rows_KB
        return both

    def stand_for(self, rows_K: Sequence[int]) -> None:
        """Have the rows of a sample stand for so many of each cluster; a cluster of which it has none stays empty."""
        factor_K1 = (np.array(rows_K) / np.maximum(self.rows_K, 1))[:, None]
        # Sums are rounded, not their terms: one row that stands for 1.6 is as often 1 as it has to be.
        until_KB = np.floor(self._rows_KB.cumsum(axis=1) * factor_K1 + 0.5).astype(np.int64)
        self._rows_KB = np.diff(until_KB, axis=1, prepend=0)

    @property
    def rows_K(self) -> np.ndarray:
        """Rows of each cluster, int64."""
        rows_K: np.ndarray = self._rows_KB.sum(axis=1)
        return rows_K

    def means(self) -> list[float | None]:
        """Mean distance in each cluster, within half of PRECISION; None where it has no row."""
        middle_B = (_EDGES[:-1] + _EDGES[1:]) / 2
        return [
            float(rows_B @ np.minimum(middle_B, most) / rows_B.sum()) if rows_B.any() else None
            for rows_B, most in zip(self._rows_KB, self._most_K, strict=True)
        ]

    def percentiles(self, percent: float) -> list[float | None]:
        """A percentile of the distances in each cluster, PRECISION too high at most and never too low; None: no row."""
        return [
            min(_percentile(_EDGES[1:], rows_B, percent), float(most)) if rows_B.any() else None
            for rows_B, most in zip(self._rows_KB, self._most_K, strict=True)
        ]

    def farther(self, other: Self, percent: float) -> list[int | None]:
        """Count the other's rows that are farther than `percent` % of these, by cluster; None where these have none.

        Rows within the bin of that percentile are thought to lie in it as these do: of equal ones as many are farther.
        """
        return [
            _farther(rows_B, other_B, percent) if rows_B.any() else None
            for rows_B, other_B in zip(self._rows_KB, other._rows_KB, strict=True)
        ]

    def to_bytes(self) -> bytes:
        """A JSON object of what was measured: for each cluster the largest distance, the bins, their rows."""
        clusters = []
        for rows_B, most in zip(self._rows_KB, self._most_K, strict=True):
            bins = np.flatnonzero(rows_B)
            clusters.append({"most": float(most), "bins": bins.tolist(), "rows": rows_B[bins].tolist()})
        return canonical({"measured": self.measured, "clusters": clusters})

    @classmethod
    def from_bytes(cls, data: bytes, num_clusters: int, where: str, fix: Fix | None = None) -> Self:
        """The inverse of `to_bytes`, for so many clusters. Raises CorruptArtifact naming `where`, with this `fix`."""
        try:
            record = _Record.model_validate(parse_object(data))
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, problem["loc"])) or "clusters"
            raise CorruptArtifact(f"{where}: not a record of distances, {field}: {problem['msg']}", fix) from None
        except ValueError as error:
            raise CorruptArtifact(f"{where}: not a record of distances: {error}", fix) from None
        if len(record.clusters) != num_clusters:
            have = len(record.clusters)
            raise CorruptArtifact(f"{where}: is of {have} clusters, its run has {num_clusters}", fix)
        distances = cls(num_clusters)
        distances.measured = record.measured
        for cluster, each in enumerate(record.clusters):
            distances._most_K[cluster] = each.most
            distances._rows_KB[cluster, list(each.bins)] = each.rows
        return distances


_EDGES = (np.arange(_FIRST, _LAST + 2, dtype=np.uint32) << np.uint32(_SHIFT)).view(np.float32).astype(np.float64)
"""The lowest distance of each bin, and the end of the last."""


def _percentile(value_B: np.ndarray, rows_B: np.ndarray, percent: float) -> float:
    """A percentile of values, ascending, that come so many times each: as numpy's, linear between two rows."""
    last_B = np.cumsum(rows_B)
    place = percent / 100 * (last_B[-1] - 1)
    lower, upper = np.searchsorted(last_B, [int(place), min(int(place) + 1, last_B[-1] - 1)], side="right")
    return float(value_B[lower] + (value_B[upper] - value_B[lower]) * (place % 1))


def _farther(rows_B: np.ndarray, other_B: np.ndarray, percent: float) -> int:
    """Count the other rows that are above a percentile of rows; both by bins."""
    last_B = np.cumsum(rows_B)
    above = (1 - percent / 100) * (last_B[-1] - 1)  # ranks above that of the percentile
    at = int(np.searchsorted(last_B, last_B[-1] - above, side="left"))
    share = (above - (last_B[-1] - last_B[at])) / rows_B[at]
    return int(other_B[at + 1 :].sum() + np.floor(share * other_B[at] + 0.5))


class _Cluster(Info):
    """Distances of a cluster's rows, as they are stored."""

    most: Annotated[Finite, Field(ge=0, le=MOST)]
    bins: Annotated[tuple[Annotated[int, Field(strict=True, ge=0, lt=_NUM)], ...], Field(max_length=_NUM)]
    rows: Annotated[tuple[Annotated[PositiveInt, Field(strict=True)], ...], Field(max_length=_NUM)]

    @model_validator(mode="after")
    def _are_counts(self) -> Self:
        ascend = all(one < other for one, other in pairwise(self.bins))
        if len(self.bins) != len(self.rows) or not ascend or sum(self.rows) >= 2**53:
            raise ValueError("bins and rows aren't counts")
        return self


class _Record(Info):
    """Distances as they are stored."""

    measured: Count
    clusters: tuple[_Cluster, ...]
