"""What came of a partition: numbers, warnings, and a page to look at, of rows seen once in a stream.

N rows, D dimensions of an embedding, C classes, F fine centroids, K clusters, S sampled rows.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from ddm_ray.config import RunConfig
from ddm_ray.core.kmeans import Centroids
from ddm_ray.data.order import ranks
from ddm_ray.data.partition_numbers import centroid_columns, distances, sizes, warnings_of
from ddm_ray.data.partition_page import page
from ddm_ray.data.partition_pictures import (
    ClusterImages,
    clusters_png,
    fine_png,
    principal_axes,
    projection_png,
    tile,
    to_image,
)
from ddm_ray.data.schema import array, data_dtype, embeddings, trains

IMAGES = 8
SHOWN_CLUSTERS = 64
PROJECTED_ROWS, SILHOUETTE_ROWS = 5000, 2000
CAPTIONS = 3


@dataclass(frozen=True)
class Report:
    """Files by name (report.html and its pictures), warnings as lines, and numbers for the manifest.

    Numbers: counts_CK (of training rows; [] for texts), rows_K, rows_heldout_K, imbalance (largest to smallest),
    entropy (of the shares, relative to equal ones), ari (with the classes), silhouette and silhouette_K (by sample);
    None where there is none.
    """

    files: dict[str, bytes]
    warnings: list[str]
    info: dict[str, Any]


@dataclass
class _Lowest:
    """The `size` payloads of lowest (key, rank) among all that were offered."""

    size: int
    kept: list[tuple[float, int, Any]] = field(default_factory=list)

    def offer(self, key_N: np.ndarray, rank_N: np.ndarray, payload: Callable[[int], Any]) -> None:
        """`payload(n)` is asked for rows that are kept for now, no others."""
        best = np.lexsort((rank_N, key_N))[: self.size]
        worst = self.kept[-1][:2] if len(self.kept) == self.size else (np.inf, 0)
        new = [(float(key_N[n]), int(rank_N[n]), int(n)) for n in best]
        taken = [(key, rank, payload(n)) for key, rank, n in new if (key, rank) < worst]
        self.kept = sorted([*self.kept, *taken], key=lambda entry: entry[:2])[: self.size]


class Survey:
    """Looks at a partition's rows as they stream by, in any order; keeps counts and samples by lowest rank."""

    def __init__(self, config: RunConfig, num_clusters: int):
        self._config = config
        self._counts_CK = np.zeros((len(config.data.class_names), num_clusters), np.int64)
        self._train_K = np.zeros(num_clusters, np.int64)
        self._heldout_K = np.zeros(num_clusters, np.int64)
        self._nearest = [_Lowest(IMAGES) for _ in range(num_clusters)]
        self._drawn = [_Lowest(IMAGES) for _ in range(num_clusters)]
        self._rank_S = np.empty(0, np.uint64)
        self._cluster_S = np.empty(0, np.int64)
        self._embedding_SD: np.ndarray | None = None

    def add(self, table: pa.Table, cluster_N: np.ndarray, distance_N: np.ndarray | None) -> None:
        """Rows by `rows_schema`, the cluster of each (-1: left out) and how far it is from its centroid, if it has one.

        Training rows are looked at, held-out ones counted.
        """
        train_N = trains(table)
        here_N = cluster_N >= 0
        num_clusters = len(self._train_K)
        self._heldout_K += np.bincount(cluster_N[here_N & ~train_N], minlength=num_clusters)
        mine = np.flatnonzero(here_N & train_N)
        cluster_N = cluster_N[mine]
        self._train_K += np.bincount(cluster_N, minlength=num_clusters)
        if len(self._counts_CK):
            np.add.at(self._counts_CK, (table["label"].to_numpy()[mine], cluster_N), 1)
        rank_N = ranks(table["id"].take(pa.array(mine)).to_pylist())
        self._sample(table, mine, rank_N, cluster_N)
        for cluster in np.unique(cluster_N):
            rows = np.flatnonzero(cluster_N == cluster)
            look = _Look(self._config, table, mine[rows])
            if distance_N is not None:
                self._nearest[cluster].offer(distance_N[mine][rows], rank_N[rows], look)
            self._drawn[cluster].offer(np.zeros(len(rows)), rank_N[rows], look)

    def _sample(self, table: pa.Table, mine: np.ndarray, rank_N: np.ndarray, cluster_N: np.ndarray) -> None:
        if "embedding" not in table.column_names:
            return
        few = np.argsort(rank_N)[:PROJECTED_ROWS]
        if len(self._rank_S) == PROJECTED_ROWS:
            few = few[rank_N[few] < self._rank_S[-1]]
        embedding_SD = embeddings(table)[mine[few]]
        if self._embedding_SD is not None:
            embedding_SD = np.concatenate([self._embedding_SD, embedding_SD])
        rank_S = np.concatenate([self._rank_S, rank_N[few]])
        order = np.argsort(rank_S)[:PROJECTED_ROWS]
        self._rank_S, self._embedding_SD = rank_S[order], embedding_SD[order]
        self._cluster_S = np.concatenate([self._cluster_S, cluster_N[few]])[order]

    def report(self, centroids: Centroids | None, facts: Mapping[str, str] | None = None) -> Report:
        """The report of all rows that were added; `facts`: more lines for its last section, such as rows left out."""
        silhouette, silhouette_K = self._silhouette()
        info = sizes(self._counts_CK, self._train_K, self._heldout_K)
        info |= {"silhouette": silhouette, "silhouette_K": silhouette_K}
        files = {"clusters.png": self._clusters()}
        if self._embedding_SD is not None:
            files["projection.png"] = self._projection(centroids)
        columns: dict[str, list[str]] = {}
        if centroids is not None:
            distance_KF = distances(centroids.coarse_KD, centroids.fine_FD)
            files["fine.png"] = fine_png(distance_KF, centroids.fine_to_coarse_F)
            columns |= centroid_columns(centroids, distance_KF)
        if self._config.data.text is not None:
            captions = [[payload[1] for _, _, payload in drawn.kept[:CAPTIONS]] for drawn in self._drawn]
            columns["for example"] = [
                "; ".join(text if len(text) < 60 else text[:59] + "…" for text in few) for few in captions
            ]
        return _report(self._config, info, files, columns, facts or {})

    def _rows(self) -> np.ndarray:
        """The sample's embeddings as they were clustered: of unit length by the spherical metric."""
        assert self._embedding_SD is not None
        if self._config.partition.metric == "euclidean":
            return self._embedding_SD
        length_S1 = np.linalg.norm(self._embedding_SD, axis=1, keepdims=True)
        return self._embedding_SD / np.maximum(length_S1, np.finfo(np.float32).tiny)

    def _silhouette(self) -> tuple[float | None, list[float | None]]:
        """Its mean over a sample of rows, and over each cluster's rows in it."""
        from sklearn.metrics import silhouette_samples

        cluster_S = self._cluster_S[:SILHOUETTE_ROWS]
        num_clusters = len(self._train_K)
        if self._embedding_SD is None or not 2 <= len(np.unique(cluster_S)) < len(cluster_S):
            return None, [None] * num_clusters
        value_S = silhouette_samples(self._rows()[:SILHOUETTE_ROWS], cluster_S)
        by_cluster = [value_S[cluster_S == cluster] for cluster in range(num_clusters)]
        return float(value_S.mean()), [float(values.mean()) if len(values) else None for values in by_cluster]

    def _clusters(self) -> bytes:
        shown = np.sort(np.argsort(-self._train_K, kind="stable")[:SHOWN_CLUSTERS])
        nearest = any(few.kept for few in self._nearest)
        lines = []
        for cluster in map(int, shown):
            groups = [self._nearest[cluster], self._drawn[cluster]] if nearest else [self._drawn[cluster]]
            images = [[payload[0] for _, _, payload in group.kept] for group in groups]
            rows = int(self._train_K[cluster])
            lines.append(
                ClusterImages(f"cluster {cluster}", f"{rows:,} rows, {rows / self._train_K.sum():.1%}", images)
            )
        headings = ["nearest to the centroid", "drawn at random"] if nearest else ["drawn at random"]
        return clusters_png(lines, headings, IMAGES)

    def _projection(self, centroids: Centroids | None) -> bytes:
        rows_SD = self._rows()
        mean_D, axes_D2 = principal_axes(rows_SD)
        if centroids is not None and self._config.partition.method == "embeddings":
            centres_KD = centroids.coarse_KD
        else:
            centres_KD = np.full((len(self._train_K), rows_SD.shape[1]), np.nan)
            for cluster in np.unique(self._cluster_S):
                centres_KD[cluster] = rows_SD[self._cluster_S == cluster].mean(axis=0)
        return projection_png((rows_SD - mean_D) @ axes_D2, self._cluster_S, (centres_KD - mean_D) @ axes_D2)


@dataclass(frozen=True)
class _Look:
    """(tile, caption or empty) of the n-th of some rows of a table."""

    config: RunConfig
    table: pa.Table
    rows: np.ndarray

    def __call__(self, n: int) -> tuple[Image.Image, str]:
        row = self.table.slice(int(self.rows[n]), 1)
        caption = row["text"][0].as_py() if self.config.data.text is not None else ""
        if self.config.data.latents is not None:
            with Image.open(io.BytesIO(row["thumbnail"][0].as_py())) as image:
                return tile(image), caption
        pixels_NCHW = array(row["data"], data_dtype(self.config.data), self.config.data.shape)
        return tile(to_image(pixels_NCHW[0])), caption


def given_report(config: RunConfig, infos: Sequence[Mapping[str, Any]]) -> Report:
    """The report of shards that were given, from the infos of their manifests alone, in order of the clusters."""
    counts_CK = np.array([info["counts_C"] for info in infos], np.int64).T
    train_K = np.array([info["rows_train"] for info in infos], np.int64)
    heldout_K = np.array([info["rows_heldout"] for info in infos], np.int64)
    info = sizes(counts_CK, train_K, heldout_K)
    return _report(config, info | {"silhouette": None, "silhouette_K": [None] * len(infos)}, {}, {}, {})


def _report(
    config: RunConfig,
    info: dict[str, Any],
    files: dict[str, bytes],
    columns: Mapping[str, list[str]],
    facts: Mapping[str, str],
) -> Report:
    warnings = warnings_of(config, info)
    html = page(config, info, warnings, files, columns, facts)
    return Report({"report.html": html.encode(), **files}, warnings, info)
