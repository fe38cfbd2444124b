"""Every row's cluster: of its nearest centroid, under a bound if clusters are balanced, or by a control's rule.

N rows of a part, F fine centroids, K clusters.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from ddm_ray.core.balance import capacity, none_empty, squared_distances, transport
from ddm_ray.core.kmeans import assign
from ddm_ray.data import OnProgress
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition.clustering import COLUMNS, Clustering, RowsReader, check_rows
from ddm_ray.data.schema import trains
from ddm_ray.data.scratch import as_scratch_error
from ddm_ray.errors import DataError
from ddm_ray.storage.run import Run

CELLS = np.dtype([("fine", "<i4"), ("train", "?"), ("key", "<u8")])


class Clusters:
    """The cluster of every row, in files of a local folder, and the clusters' counts of rows."""

    def __init__(self, folder: Path, num_clusters: int):
        self.folder = folder
        self.rows_train_K = np.zeros(num_clusters, np.int64)
        self.rows_heldout_K = np.zeros(num_clusters, np.int64)

    def part(self, number: int) -> np.ndarray:
        """cluster_N int64 of the rows of one part."""
        return np.load(self._path(number)).astype(np.int64)

    def put(self, number: int, cluster_N: np.ndarray, train_N: np.ndarray) -> None:
        """Keep a part's clusters, and count its rows."""
        _save(self._path(number), cluster_N.astype(np.int32))
        num_clusters = len(self.rows_train_K)
        self.rows_train_K += np.bincount(cluster_N[train_N], minlength=num_clusters)
        self.rows_heldout_K += np.bincount(cluster_N[~train_N], minlength=num_clusters)

    def _path(self, number: int) -> Path:
        return self.folder / f"cluster-{number:07d}.npy"


def assign_rows(
    rows: RowsReader, clustering: Clustering | None, folder: Path, on_progress: OnProgress
) -> tuple[Clusters, Clustering | None]:
    """Assign every row to a cluster. Of balanced clusters, a fine centroid's is the one that took most of its rows.

    `folder` takes 4 bytes a row, 17 where clusters are balanced. Rows that are appended go to the clusters that there
    are, some perhaps to none of them, and no bound is kept. Raises DataError where a cluster has no training row.
    """
    config = rows.run.config.partition
    clusters = Clusters(folder, config.num_clusters)
    if clustering is None:
        for number, table in enumerate(rows.parts(COLUMNS.get(config.method, []), on_progress)):
            clusters.put(number, _control(rows.run, table), trains(table))
    elif config.max_share is not None and not rows.run.appends:
        fine_to_coarse_F = _balance(rows, clustering, clusters, on_progress)
        clustering = replace(clustering, centroids=replace(clustering.centroids, fine_to_coarse_F=fine_to_coarse_F))
    else:
        for number, table in enumerate(rows.parts(COLUMNS[config.method], on_progress)):
            clusters.put(number, nearest(clustering, table), trains(table))
    if rows.run.appends:
        return clusters, clustering
    check_rows(rows.run, int(clusters.rows_train_K.sum()))
    if empty := np.flatnonzero(clusters.rows_train_K == 0).tolist():
        raise DataError(
            f"{rows.run.url}: clusters {empty} have no training row: too few different rows;"
            " use fewer partition.num_clusters"
        )
    return clusters, clustering


def nearest(clustering: Clustering, table: pa.Table) -> np.ndarray:
    """cluster_N of the nearest centroid; of the nearest fine one, too, where clusters were balanced."""
    centroids, features_ND = clustering.centroids, clustering.features(table)
    config = clustering.features.run.config.partition
    if config.nearest == "fine" or config.max_share is not None:
        return centroids.fine_to_coarse_F[assign(features_ND, centroids.fine_FD)]
    return assign(features_ND, centroids.coarse_KD)


def _control(run: Run, table: pa.Table) -> np.ndarray:
    config = run.config.partition
    if config.method == "label":
        return table["label"].to_numpy() * config.num_clusters // len(run.config.data.class_names)
    # Other bits than the shuffle keys': the order of a shard's rows is independent of its cluster.
    bits_N = shuffle_keys(f"{config.seed} {row_id}" for row_id in table["id"].to_pylist()) >> np.uint64(32)
    return ((bits_N * np.uint64(config.num_clusters)) >> np.uint64(32)).astype(np.int64)


def _balance(rows: RowsReader, clustering: Clustering, clusters: Clusters, on_progress: OnProgress) -> np.ndarray:
    """Share fine cells out so that no cluster has more than its share of the training rows, exactly.

    The clusters of a split cell each take a range of its training rows' shuffle keys; held-out rows go by the same
    ranges. Returns fine_to_coarse_F, the cluster that took most of a cell's rows.
    """
    config, centroids = rows.run.config.partition, clustering.centroids
    mass_F = _write_cells(rows, clustering, clusters, on_progress)
    assert config.max_share is not None
    max_rows = capacity(int(mass_F.sum()), config.max_share, config.num_clusters)
    cost_FK = squared_distances(centroids.fine_FD, centroids.coarse_KD)
    # The centroids are those of a sample under its own bound: under the bound of all rows one may have no row.
    quota_FK = none_empty(transport(mass_F, cost_FK, max_rows), cost_FK)
    # A fine cell of held-out rows alone goes to the nearest cluster.
    cluster_F = np.where(mass_F > 0, quota_FK.argmax(axis=1), assign(centroids.fine_FD, centroids.coarse_KD))
    ranges = _key_ranges(len(rows.names), clusters, quota_FK)
    for number in range(len(rows.names)):
        cells = np.load(_cells(clusters, number))
        cluster_N = cluster_F[cells["fine"]]
        for cell, (takers, first_keys) in ranges.items():
            here_N = cells["fine"] == cell
            cluster_N[here_N] = takers[np.searchsorted(first_keys, cells["key"][here_N], side="right")]
        clusters.put(number, cluster_N, cells["train"])
        _cells(clusters, number).unlink()
    assert clusters.rows_train_K.max() <= max_rows
    return cluster_F


def _write_cells(rows: RowsReader, clustering: Clustering, clusters: Clusters, on_progress: OnProgress) -> np.ndarray:
    """Write each row's fine cell, split and key to the clusters' folder; mass_F, training rows by cell."""
    fine_FD = clustering.centroids.fine_FD
    mass_F = np.zeros(len(fine_FD), np.int64)
    for number, table in enumerate(rows.parts(COLUMNS[rows.run.config.partition.method], on_progress)):
        cells = np.empty(table.num_rows, CELLS)
        cells["fine"], cells["train"] = assign(clustering.features(table), fine_FD), trains(table)
        cells["key"] = shuffle_keys(table["id"].to_pylist())
        mass_F += np.bincount(cells["fine"][cells["train"]], minlength=len(fine_FD))
        _save(_cells(clusters, number), cells)
    return mass_F


def _key_ranges(num_parts: int, clusters: Clusters, quota_FK: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """For each cell that is split: the clusters that take its rows, and the first key of each but the first's."""
    keys: dict[int, list[np.ndarray]] = {int(cell): [] for cell in np.flatnonzero((quota_FK > 0).sum(axis=1) > 1)}
    for number in range(num_parts):
        cells = np.load(_cells(clusters, number))
        for cell, cell_keys in keys.items():
            cell_keys.append(cells["key"][(cells["fine"] == cell) & cells["train"]])
    ranges: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for cell, cell_keys in keys.items():
        takers = np.flatnonzero(quota_FK[cell])
        first_rows = np.cumsum(quota_FK[cell, takers])[:-1]
        ranges[cell] = (takers, np.sort(np.concatenate(cell_keys))[first_rows])
    return ranges


def _cells(clusters: Clusters, number: int) -> Path:
    return clusters.folder / f"cells-{number:07d}.npy"


def _save(path: Path, values: np.ndarray) -> None:
    with as_scratch_error(path.parent):
        np.save(path, values)
