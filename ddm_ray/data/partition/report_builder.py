"""The report of a partition, built from rows seen once, in parts: warnings, pictures, a page to look at.

N rows, D dimensions of an embedding, F fine centroids, K clusters, S sampled rows.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
from PIL import Image

from ddm_ray.config import RunConfig
from ddm_ray.core.kmeans import Centroids
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition.distances import FILE, Distances
from ddm_ray.data.partition.fit import Earlier, fits
from ddm_ray.data.partition.numbers import centroid_columns, distances, fit_columns, fit_words, warnings_of
from ddm_ray.data.partition.page import page
from ddm_ray.data.partition.pictures import (
    ClusterImages,
    clusters_png,
    fine_png,
    principal_axes,
    projection_png,
    tile,
    to_image,
)
from ddm_ray.data.partition.sample import LowestKeys, RowSample, likely_limit
from ddm_ray.data.schema import embeddings, stored_images, trains
from ddm_ray.storage.info import ClusterFit, PartitionInfo, ReportInfo

IMAGES = 8
SHOWN_CLUSTERS = 64
PROJECTED_ROWS, SILHOUETTE_ROWS = 5000, 2000
CAPTIONS = 3
SeenT = TypeVar("SeenT")


@dataclass(frozen=True)
class Report:
    """Files by name: report.html and its pictures; and what its manifest holds."""

    files: dict[str, bytes]
    info: ReportInfo


class ReportBuilder:
    """Looks at the rows of a partition, in any order, and keeps samples of them, and their distances.

    Builders of some of the rows each, which can be pickled, are joined to that of all. `num_rows`: training rows that
    are added to all of them together. `earlier`: the rows that these were appended to.
    """

    def __init__(self, config: RunConfig, info: PartitionInfo, num_rows: int, earlier: Earlier | None = None):
        self.earlier = earlier
        self._config, self._info, self._num_clusters = config, info, config.partition.num_clusters
        self._distances = Distances(self._num_clusters)
        self._shown = np.sort(np.argsort(-np.array(info.rows_K), kind="stable")[:SHOWN_CLUSTERS]).tolist()
        self._nearest: Tiles = {cluster: _Looks(IMAGES) for cluster in self._shown}
        self._random: Tiles = {cluster: _Looks(IMAGES) for cluster in self._shown}
        self._captions: list[_Looks[str]] = (
            [_Looks(CAPTIONS) for _ in range(self._num_clusters)] if config.data.text is not None else []
        )
        self._sample, self._limit = RowSample(PROJECTED_ROWS), likely_limit(PROJECTED_ROWS, num_rows)

    def add(self, table: pa.Table, cluster_N: np.ndarray, distance_N: np.ndarray | None) -> None:
        """Rows by `rows_schema`, the cluster of each, and its distance from the centroid, if clusters have any.

        Held-out rows are passed over.
        """
        train = np.flatnonzero(trains(table))
        cluster_N = cluster_N[train]
        key_N = shuffle_keys(table["id"].take(pa.array(train)).to_pylist())
        if "embedding" in table.column_names:
            low = slice(None) if self._limit is None else key_N <= self._limit
            self._sample.add(key_N[low], embeddings(table)[train][low], cluster_N[low])
        if distance_N is not None:
            self._distances.add(cluster_N, distance_N[train])
        for cluster in np.unique(cluster_N).tolist():
            rows = np.flatnonzero(cluster_N == cluster)
            if self._captions:
                self._captions[cluster].offer(key_N[rows], _Caption(table, train[rows]))
            if cluster not in self._random:
                continue
            tile_of = _Tile(self._config, table, train[rows])
            if distance_N is not None:
                self._nearest[cluster].offer(_nearest_first(distance_N[train][rows], key_N[rows]), tile_of)
            self._random[cluster].offer(key_N[rows], tile_of)

    def join(self, other: "ReportBuilder") -> None:
        """Add what a builder of other rows of the partition has kept."""
        self._distances = self._distances.joined(other._distances)
        self._sample.join(other._sample)
        for cluster in self._shown:
            self._nearest[cluster].join(other._nearest[cluster])
            self._random[cluster].join(other._random[cluster])
        for own, others in zip(self._captions, other._captions, strict=True):
            own.join(others)

    def build(self, centroids: Centroids | None, facts: Mapping[str, str]) -> Report:
        """The report of all rows that were added; `facts`: more lines for its last section, such as rows left out."""
        fit = fits(self._distances, self.earlier) if self.earlier else ()
        embedding_SD, cluster_S = self._sampled()
        silhouette, silhouette_K = self._silhouette(embedding_SD, cluster_S)
        files = {"clusters.png": self._clusters()}
        if embedding_SD is not None:
            files["projection.png"] = self._projection(embedding_SD, cluster_S, centroids)
        columns: dict[str, list[str]] = {}
        if centroids is not None:
            distance_KF = distances(centroids.coarse_KD, centroids.fine_FD)
            files["fine.png"] = fine_png(distance_KF, centroids.fine_to_coarse_F)
            columns |= centroid_columns(centroids, distance_KF)
            so_far = self._distances.joined(self.earlier.distances) if self.earlier else self._distances
            files[FILE] = so_far.to_bytes()
        columns |= fit_columns(fit)
        if self._captions:
            columns["for example"] = [
                "; ".join(text if len(text) < 60 else text[:59] + "…" for text in looks.kept())
                for looks in self._captions
            ]
        return _report(self._config, self._info, (silhouette, silhouette_K), files, columns, facts, fit)

    def _sampled(self) -> tuple[np.ndarray | None, np.ndarray]:
        """embedding_SD as they were clustered, of unit length by the spherical metric; cluster_S."""
        if not len(self._sample):
            return None, np.empty(0, np.int64)
        embedding_SD, cluster_S = self._sample.arrays()
        if self._config.partition.metric == "spherical":
            length_S1 = np.linalg.norm(embedding_SD, axis=1, keepdims=True)
            embedding_SD = embedding_SD / np.maximum(length_S1, np.finfo(np.float32).tiny)
        return embedding_SD, cluster_S

    def _silhouette(
        self, embedding_SD: np.ndarray | None, cluster_S: np.ndarray
    ) -> tuple[float | None, list[float | None]]:
        """Mean silhouette of a sample of rows, and of each cluster's rows in it."""
        from sklearn.metrics import silhouette_samples

        cluster_S = cluster_S[:SILHOUETTE_ROWS]
        if embedding_SD is None or not 2 <= len(np.unique(cluster_S)) < len(cluster_S):
            return None, [None] * self._num_clusters
        value_S = silhouette_samples(embedding_SD[:SILHOUETTE_ROWS], cluster_S)
        by_cluster = [value_S[cluster_S == cluster] for cluster in range(self._num_clusters)]
        return float(value_S.mean()), [float(values.mean()) if len(values) else None for values in by_cluster]

    def _clusters(self) -> bytes:
        rows_K = np.array(self._info.rows_K)
        groups = {"drawn at random": self._random}
        if any(looks.kept() for looks in self._nearest.values()):
            groups = {"nearest to the centroid": self._nearest, **groups}
        lines = []
        for cluster in self._shown:
            images = [group[cluster].kept() for group in groups.values()]
            rows = int(rows_K[cluster])
            lines.append(ClusterImages(f"cluster {cluster}", f"{rows:,} rows, {rows / rows_K.sum():.1%}", images))
        return clusters_png(lines, list(groups), IMAGES)

    def _projection(self, embedding_SD: np.ndarray, cluster_S: np.ndarray, centroids: Centroids | None) -> bytes:
        mean_D, axes_D2 = principal_axes(embedding_SD)
        if centroids is not None and self._config.partition.method == "embeddings":
            centres_KD = centroids.coarse_KD
        else:
            centres_KD = np.full((self._num_clusters, embedding_SD.shape[1]), np.nan)
            for cluster in np.unique(cluster_S):
                centres_KD[cluster] = embedding_SD[cluster_S == cluster].mean(axis=0)
        return projection_png((embedding_SD - mean_D) @ axes_D2, cluster_S, (centres_KD - mean_D) @ axes_D2)


class _Looks(Generic[SeenT]):
    """The rows of the `size` lowest keys, looked at."""

    def __init__(self, size: int):
        self._keys = LowestKeys(size)
        self._seen: dict[int, SeenT] = {}

    def offer(self, key_N: np.ndarray, look: Callable[[int], SeenT]) -> None:
        """`look(n)` is called for rows that are kept for now, no others."""
        for row, slot in zip(*self._keys.offer(key_N), strict=True):
            self._seen[int(slot)] = look(int(row))

    def join(self, other: "_Looks[SeenT]") -> None:
        """Add what others saw."""
        seen = other.kept()
        self.offer(other._keys.lowest, seen.__getitem__)

    def kept(self) -> list[SeenT]:
        """Return what was seen of the rows, in the order of their keys."""
        self._seen = {number: self._seen[int(slot)] for number, slot in enumerate(self._keys.sort())}
        return list(self._seen.values())


Tiles = dict[int, _Looks[Image.Image]]


@dataclass(frozen=True)
class _Caption:
    """The caption of the n-th of some rows of a table."""

    table: pa.Table
    rows: np.ndarray

    def __call__(self, n: int) -> str:
        return str(self.table["text"][int(self.rows[n])].as_py())


@dataclass(frozen=True)
class _Tile:
    """The tile of the n-th of some rows of a table."""

    config: RunConfig
    table: pa.Table
    rows: np.ndarray

    def __call__(self, n: int) -> Image.Image:
        row = self.table.slice(int(self.rows[n]), 1)
        if self.config.data.latents is not None:
            with Image.open(io.BytesIO(row["thumbnail"][0].as_py())) as image:
                return tile(image)
        pixels_NCHW = stored_images(row, self.config.data)
        return tile(to_image(pixels_NCHW[0]))


def _nearest_first(distance_N: np.ndarray, key_N: np.ndarray) -> np.ndarray:
    """Keys that order rows by distance, and rows of equal distance by their own keys' upper half."""
    # Floats that aren't negative are in the order of their bits.
    bits_N = distance_N.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (bits_N << np.uint64(32)) | (key_N >> np.uint64(32))


def given_report(config: RunConfig, info: PartitionInfo) -> Report:
    """The report of shards that were given, without their rows."""
    return _report(config, info, (None, [None] * len(info.rows_K)), {}, {}, {})


def _report(
    config: RunConfig,
    info: PartitionInfo,
    silhouettes: tuple[float | None, list[float | None]],
    files: dict[str, bytes],
    columns: Mapping[str, list[str]],
    facts: Mapping[str, str],
    fit: tuple[ClusterFit, ...] = (),
) -> Report:
    silhouette, silhouette_K = silhouettes
    numbers: dict[str, Any] = {**info.as_json(), "silhouette": silhouette, "silhouette_K": silhouette_K}
    warnings = [*fit_words(fit), *warnings_of(config, numbers)]
    html = page(config, numbers, warnings, files, columns, facts)
    return Report(
        {"report.html": html.encode(), **files},
        ReportInfo(silhouette=silhouette, silhouette_K=tuple(silhouette_K), warnings=tuple(warnings), fit=fit),
    )
