"""Every row's cluster: of its nearest centroid, within a bound if clusters are balanced, or by a control's rule.

N rows of a part, F fine centroids, K clusters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from ddm_ray.core.balance import capacity, none_empty, squared_distances, transport
from ddm_ray.core.kmeans import assign
from ddm_ray.data import OnProgress, phase
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition.clustering import COLUMNS, Clustering, RowsReader, check_rows
from ddm_ray.data.partition.passes import Executor
from ddm_ray.data.schema import trains
from ddm_ray.errors import DataError
from ddm_ray.run.run import Run

CELLS = np.dtype([("fine", "<i4"), ("train", "?"), ("key", "<u8")])
Ranges = Mapping[int, tuple[np.ndarray, np.ndarray]]
"""For each fine cell that clusters share: these clusters, and the first shuffle key of each but the first cluster."""


@dataclass(frozen=True)
class RowClusters:
    """Assigns a cluster to a row by the row alone, independent of where and in which order rows are seen.

    Clusters are meant by their place among the `num_clusters` that the rows are divided into. `cluster_F`: the cluster
    of each fine cell, if clusters are balanced; cells in `ranges` are shared.
    """

    run: Run
    clustering: Clustering | None
    num_clusters: int
    cluster_F: np.ndarray | None = None
    ranges: Ranges = field(default_factory=dict)

    def __call__(self, table: pa.Table) -> np.ndarray:
        """cluster_N int64 of rows, from the columns that the method needs."""
        if self.num_clusters == 1:
            return np.zeros(table.num_rows, np.int64)
        if self.clustering is None:
            return _control(self.run, table)
        if self.cluster_F is None:
            return nearest_clusters(self.clustering, table)
        fine_N = _cells(self.clustering, table)
        cluster_N = self.cluster_F[fine_N]
        for cell, (takers, first_keys) in self.ranges.items():
            here = np.flatnonzero(fine_N == cell)
            key_N = shuffle_keys(table["id"].take(pa.array(here)).to_pylist())
            cluster_N[here] = takers[np.searchsorted(first_keys, key_N, side="right")]
        return cluster_N

    def count(self, tables: Iterator[pa.Table]) -> Iterator[np.ndarray]:
        """Yield one rows_2K int64: training and held-out rows of all tables, by cluster."""
        rows_2K = np.zeros((2, self.num_clusters), np.int64)
        for table in tables:
            rows_2K += _by_split(self(table), trains(table), rows_2K.shape[1])
        yield rows_2K

    @property
    def columns(self) -> list[str]:
        """The columns that determine a row's cluster, besides id and split."""
        return [] if self.num_clusters == 1 else COLUMNS.get(self.run.config.partition.method, [])


@dataclass(frozen=True)
class Assigned:
    """The clusters of all rows, and the exact number of rows of each."""

    clusters: RowClusters
    rows_train_K: np.ndarray
    rows_heldout_K: np.ndarray

    @property
    def clustering(self) -> Clustering | None:
        """The centroids. If clusters are balanced, a fine centroid's cluster is the one that took most of its rows."""
        return self.clusters.clustering

    def distances(self, table: pa.Table, cluster_N: np.ndarray) -> np.ndarray | None:
        """distance_N of rows from the centroids of their clusters; None if there are no centroids."""
        return self.clustering.distances(table, cluster_N) if self.clustering else None


def assign_rows(
    rows: RowsReader,
    clustering: Clustering | None,
    on_progress: OnProgress,
    execute: Executor,
    num_clusters: int | None = None,
    balanced: bool = True,
    appended: bool = False,
) -> Assigned:
    """Assign all rows to clusters, and count them. Clusters that are `balanced` need two passes over the rows.

    `num_clusters`: None means as many as are configured. `appended`: the rows join clusters that have others; a cluster
    may get none. Otherwise raises DataError if a cluster has no training row.
    """
    num_clusters = num_clusters or rows.run.config.partition.num_clusters
    if clustering is not None and rows.run.config.partition.max_share is not None and balanced:
        assigned = _balance(rows, clustering, on_progress, execute)
    else:
        clusters = RowClusters(rows.run, clustering, num_clusters)
        assigned = Assigned(clusters, *count_rows(rows, clusters, on_progress, execute))
    if appended:
        return assigned
    check_rows(rows.run, int(assigned.rows_train_K.sum()), num_clusters)
    if empty := np.flatnonzero(assigned.rows_train_K == 0).tolist():
        numbers = [rows.run.config.partition.clusters[each] for each in empty]
        raise DataError(
            f"{rows.run.url}: clusters {numbers} have no training row: too few different rows;"
            " use fewer partition.num_clusters"
        )
    return assigned


def count_rows(rows: RowsReader, clusters: RowClusters, on_progress: OnProgress, execute: Executor) -> np.ndarray:
    """rows_2K int64: training and held-out rows by cluster, over all rows."""
    counts: np.ndarray = np.sum([*execute.each(rows, clusters.count, clusters.columns, on_progress)], axis=0)
    return counts


def nearest_clusters(clustering: Clustering, table: pa.Table) -> np.ndarray:
    """cluster_N of the nearest centroid, or of the nearest fine centroid as configured and for balanced clusters."""
    config = clustering.features.run.config.partition
    if config.nearest == "fine" or config.max_share is not None:
        return clustering.centroids.fine_to_coarse_F[_cells(clustering, table)]
    return assign(clustering.features(table), clustering.centroids.coarse_KD)


def _cells(clustering: Clustering, table: pa.Table) -> np.ndarray:
    """fine_N: the fine centroid nearest to each row."""
    return assign(clustering.features(table), clustering.centroids.fine_FD)


def _control(run: Run, table: pa.Table) -> np.ndarray:
    config = run.config.partition
    if config.method == "label":
        return table["label"].to_numpy() * config.num_clusters // len(run.config.data.class_names)
    # Bits that the shuffle keys don't use, so that the order of a shard's rows is independent of its cluster.
    bits_N = shuffle_keys(f"{config.seed} {row_id}" for row_id in table["id"].to_pylist()) >> np.uint64(32)
    return ((bits_N * np.uint64(config.num_clusters)) >> np.uint64(32)).astype(np.int64)


def _by_split(place_N: np.ndarray, train_N: np.ndarray, places: int) -> np.ndarray:
    """Numbers of training and of held-out rows, by place."""
    return np.stack([np.bincount(place_N[split_N], minlength=places) for split_N in (train_N, ~train_N)])


@dataclass(frozen=True)
class _CountCells:
    """Yields one rows_2F of tables: training and held-out rows by fine cell."""

    clustering: Clustering

    def __call__(self, tables: Iterator[pa.Table]) -> Iterator[np.ndarray]:
        rows_2F = np.zeros((2, len(self.clustering.centroids.fine_FD)), np.int64)
        for table in tables:
            rows_2F += _by_split(_cells(self.clustering, table), trains(table), rows_2F.shape[1])
        yield rows_2F


@dataclass(frozen=True)
class _RowsOfCells:
    """Yields the rows of some fine cells, table by table: cell, split and key of each."""

    clustering: Clustering
    cells: np.ndarray

    def __call__(self, tables: Iterator[pa.Table]) -> Iterator[np.ndarray]:
        for table in tables:
            fine_N = _cells(self.clustering, table)
            here = np.flatnonzero(np.isin(fine_N, self.cells))
            rows = np.empty(len(here), CELLS)
            rows["fine"], rows["train"] = fine_N[here], trains(table)[here]
            rows["key"] = shuffle_keys(table["id"].take(pa.array(here)).to_pylist())
            yield rows


def _balance(rows: RowsReader, clustering: Clustering, on_progress: OnProgress, execute: Executor) -> Assigned:
    """Divide the fine cells so that no cluster exceeds its share of the training rows; the bound is exact.

    Each cluster of a divided cell takes a range of its training rows' shuffle keys; held-out rows use the same ranges.
    A fine centroid's cluster is the one that took most of its cell's rows.
    """
    config, centroids = rows.run.config.partition, clustering.centroids
    assert config.max_share is not None
    counted = phase(on_progress, 0.0, 0.5, "cells")
    rows_2F = np.sum([*execute.each(rows, _CountCells(clustering), COLUMNS[config.method], counted)], axis=0)
    mass_F = rows_2F[0]
    max_rows = capacity(int(mass_F.sum()), config.max_share, config.num_clusters)
    cost_FK = squared_distances(centroids.fine_FD, centroids.coarse_KD)
    # The centroids come from a sample with a bound of its own. Under the bound of all rows, a cluster may get no row.
    quota_FK = none_empty(transport(mass_F, cost_FK, max_rows), cost_FK)
    # A fine cell with held-out rows only goes to the nearest cluster.
    cluster_F = np.where(mass_F > 0, quota_FK.argmax(axis=1), assign(centroids.fine_FD, centroids.coarse_KD))
    ranges, shared = _share_cells(rows, clustering, quota_FK, phase(on_progress, 0.5, 1.0, "shared cells"), execute)
    rows_2K = np.zeros((2, config.num_clusters), np.int64)
    own_F = ~np.isin(np.arange(len(mass_F)), list(ranges))
    for by_cluster_K, by_cell_F in zip(rows_2K, rows_2F, strict=True):
        np.add.at(by_cluster_K, cluster_F[own_F], by_cell_F[own_F])
    for cell, (takers, first_keys) in ranges.items():
        here = shared[shared["fine"] == cell]
        cluster_N = takers[np.searchsorted(first_keys, here["key"], side="right")]
        rows_2K += _by_split(cluster_N, here["train"], config.num_clusters)
    assert rows_2K[0].max() <= max_rows
    clustering = replace(clustering, centroids=replace(centroids, fine_to_coarse_F=cluster_F))
    return Assigned(RowClusters(rows.run, clustering, config.num_clusters, cluster_F, ranges), *rows_2K)


def _share_cells(
    rows: RowsReader, clustering: Clustering, quota_FK: np.ndarray, on_progress: OnProgress, execute: Executor
) -> tuple[Ranges, np.ndarray]:
    """Divide the cells in which several clusters have rows: returns the ranges, and these cells' rows as CELLS."""
    cells = np.flatnonzero((quota_FK > 0).sum(axis=1) > 1)
    if not len(cells):
        return {}, np.empty(0, CELLS)
    columns = COLUMNS[rows.run.config.partition.method]
    shared = np.concatenate([*execute.each(rows, _RowsOfCells(clustering, cells), columns, on_progress)])
    ranges = {}
    for cell in cells.tolist():
        takers = np.flatnonzero(quota_FK[cell])
        first_rows = np.cumsum(quota_FK[cell, takers])[:-1]
        ranges[cell] = (takers, np.sort(shared["key"][(shared["fine"] == cell) & shared["train"]])[first_rows])
    return ranges, shared
