"""Builds the report of a partition in one pass over its rows, in parts: numbers, warnings, and a page.

N rows, D dimensions of an embedding, K clusters, S sampled rows.
"""

import io
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from PIL import Image

from ddm_ray.config import RunConfig
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition.numbers import FAR, size_warnings, unlike
from ddm_ray.data.partition.page import Shown, render_partition
from ddm_ray.data.partition.sample import RowSample, likely_limit
from ddm_ray.data.schema import embeddings, stored_images, trains
from ddm_ray.pictures.png import to_png
from ddm_ray.run.info import ClusterFit, PartitionInfo, ReportInfo, RowsInfo

IMAGES, TILE = 8, 64
SHOWN_CLUSTERS = 64
SILHOUETTE_ROWS, MEASURED_ROWS = 2000, 2**16
Looks = dict[int, Shown]
"""Rows by their keys, in the form that the page shows."""


@dataclass(frozen=True)
class Report:
    """The page, and the contents of its manifest."""

    html: bytes
    info: ReportInfo


class ReportBuilder:
    """Looks at the rows of a partition, in any order, and keeps samples of them.

    Builders can be pickled. Each sees some of the rows, and `join` merges them. `num_rows`: training rows of all
    builders together. `far_K`: `ReportInfo.far_K` of the earlier rows, if rows were appended.
    """

    def __init__(
        self, config: RunConfig, info: PartitionInfo, num_rows: int, far_K: tuple[float | None, ...] = ()
    ) -> None:
        self._config, self._info, self._num_clusters = config, info, config.partition.num_clusters
        largest = np.argsort(-np.array(info.rows_K), kind="stable")[:SHOWN_CLUSTERS]
        self._looks: dict[int, Looks] = {cluster: {} for cluster in largest.tolist()}
        self._embeddings, self._limit = RowSample(SILHOUETTE_ROWS), likely_limit(SILHOUETTE_ROWS, num_rows)
        self._distances, self._far_K = RowSample(MEASURED_ROWS), far_K
        self._rows_K, self._far_rows_K = np.zeros((2, self._num_clusters), np.int64)

    def add(self, table: pa.Table, cluster_N: np.ndarray, distance_N: np.ndarray | None) -> None:
        """Add rows of `rows_schema`, their clusters, and their distances from the centroids, if there are centroids.

        Held-out rows are skipped.
        """
        train = np.flatnonzero(trains(table))
        cluster_N = cluster_N[train]
        key_N = shuffle_keys(table["id"].take(pa.array(train)).to_pylist())
        self._rows_K += np.bincount(cluster_N, minlength=self._num_clusters)
        if "embedding" in table.column_names:
            low = slice(None) if self._limit is None else key_N <= self._limit
            self._embeddings.add(key_N[low], embeddings(table)[train][low], cluster_N[low])
        if distance_N is not None:
            distance_N = distance_N[train].astype(np.float32)
            self._distances.add(key_N, distance_N, cluster_N)
            if self._far_K:
                limit_K = np.array([np.inf if far is None else far for far in self._far_K])
                far_N = distance_N > limit_K[cluster_N]
                self._far_rows_K += np.bincount(cluster_N[far_N], minlength=self._num_clusters)
        for cluster in np.unique(cluster_N).tolist():
            if (looks := self._looks.get(cluster)) is not None:
                rows = np.flatnonzero(cluster_N == cluster)
                self._look(looks, key_N[rows], table, train[rows])

    def _look(self, looks: Looks, key_N: np.ndarray, table: pa.Table, rows: np.ndarray) -> None:
        """Keep a cluster's rows with the lowest keys so far."""
        for place in np.argsort(key_N)[:IMAGES].tolist():
            if len(looks) == IMAGES and key_N[place] > max(looks):
                break
            looks[int(key_N[place])] = _shown(self._config, table.slice(int(rows[place]), 1))
            if len(looks) > IMAGES:
                del looks[max(looks)]

    def join(self, other: "ReportBuilder") -> None:
        """Add the rows of another builder."""
        self._embeddings.join(other._embeddings)
        self._distances.join(other._distances)
        self._rows_K, self._far_rows_K = self._rows_K + other._rows_K, self._far_rows_K + other._far_rows_K
        for cluster, looks in self._looks.items():
            self._looks[cluster] = dict(sorted({**looks, **other._looks[cluster]}.items())[:IMAGES])

    def build(self, rows: RowsInfo | None = None) -> Report:
        """Build the report of all added rows. `rows`: their record, unless they are their owners'."""
        fit = self._fit()
        info = ReportInfo(
            silhouette=self._silhouette(),
            warnings=(*unlike(self._config, fit), *size_warnings(self._config, self._info)),
            fit=fit,
            far_K=self._far_K or self._limits(),
        )
        looks_K = [self._looks.get(cluster, {}) for cluster in range(self._num_clusters)]
        shown_K = [[looks[key] for key in sorted(looks)] for looks in looks_K]
        return Report(render_partition(self._config, self._info, info, shown_K, rows).encode(), info)

    def _silhouette(self) -> float | None:
        """Mean silhouette of a sample of rows, in the metric that clustering used; None if it is undefined."""
        from sklearn.metrics import silhouette_score

        if not len(self._embeddings):
            return None
        embedding_SD, cluster_S = self._embeddings.arrays()
        if not 2 <= len(np.unique(cluster_S)) < len(cluster_S):
            return None
        if self._config.partition.metric == "spherical":
            length_S1 = np.linalg.norm(embedding_SD, axis=1, keepdims=True)
            embedding_SD = embedding_SD / np.maximum(length_S1, np.finfo(np.float32).tiny)
        return float(silhouette_score(embedding_SD, cluster_S))

    def _limits(self) -> tuple[float | None, ...]:
        """`ReportInfo.far_K` of the added rows; empty if they have no distances."""
        if not len(self._distances):
            return ()
        distance_S, cluster_S = self._distances.arrays()
        by_cluster = [distance_S[cluster_S == cluster] for cluster in range(self._num_clusters)]
        return tuple(float(np.percentile(values, FAR)) if len(values) else None for values in by_cluster)

    def _fit(self) -> tuple[ClusterFit, ...]:
        """The fit of each cluster's appended rows; empty if no rows were appended, or they can't be compared."""
        return tuple(
            ClusterFit(rows=int(rows), far=None if limit is None else int(far))
            for rows, far, limit in zip(self._rows_K, self._far_rows_K, self._far_K, strict=bool(self._far_K))
        )


def _shown(config: RunConfig, row: pa.Table) -> Shown:
    """Convert a table of one row to its form on the page."""
    if config.data.latents is not None:
        image: Image.Image = Image.open(io.BytesIO(row["thumbnail"][0].as_py()))
    else:
        pixels_HWC = np.ascontiguousarray(stored_images(row, config.data)[0].transpose(1, 2, 0))
        image = Image.fromarray(pixels_HWC[:, :, 0] if pixels_HWC.shape[2] == 1 else pixels_HWC)
    image = image.convert("RGB")
    image.thumbnail((TILE, TILE), Image.Resampling.LANCZOS)  # a smaller image keeps its size
    return Shown(to_png(image), row["text"][0].as_py() if config.data.text is not None else "")
