"""Every row's cluster: of its nearest centroid, under a bound if clusters are balanced, or by a control's rule.

N rows of a part, F fine centroids, K clusters.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from ddm_ray.core.balance import capacity, none_empty, squared_distances, transport
from ddm_ray.core.kmeans import Centroids, assign
from ddm_ray.data import Progress
from ddm_ray.data.clustering import COLUMNS, Features, Rows, check_rows
from ddm_ray.data.order import ranks
from ddm_ray.data.schema import trains
from ddm_ray.data.scratch import told
from ddm_ray.errors import DataError
from ddm_ray.storage.run import Run

CELLS = np.dtype([("fine", "<i4"), ("train", "?"), ("rank", "<u8")])


class Clusters:
    """The cluster of every row, in files of a local folder, and what they hold; made by `find`."""

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


def find(
    rows: Rows, fitted: tuple[Features, Centroids] | None, folder: Path, tell: Progress
) -> tuple[Clusters, Centroids | None]:
    """Every row's cluster, and the centroids with the cluster that most of each fine one's rows went to.

    `folder` takes 4 bytes a row, 17 where clusters are balanced. Raises DataError where a cluster has no training row.
    """
    config = rows.run.config.partition
    clusters = Clusters(folder, config.num_clusters)
    centroids = None
    if fitted is None:
        for number, table in enumerate(rows.parts(COLUMNS.get(config.method, []), tell)):
            clusters.put(number, _control(rows.run, table), trains(table))
    else:
        features, centroids = fitted
        if config.max_share is None:
            fine = config.nearest == "fine"
            for number, table in enumerate(rows.parts(COLUMNS[config.method], tell)):
                nearest_N = assign(features(table), centroids.fine_FD if fine else centroids.coarse_KD)
                cluster_N = centroids.fine_to_coarse_F[nearest_N] if fine else nearest_N
                clusters.put(number, cluster_N, trains(table))
        else:
            centroids = _balance(rows, features, centroids, clusters, tell)
    check_rows(rows.run, int(clusters.rows_train_K.sum()))
    if empty := np.flatnonzero(clusters.rows_train_K == 0).tolist():
        raise DataError(
            f"{rows.run.url}: clusters {empty} have no training row: too few different rows;"
            " use fewer partition.num_clusters"
        )
    return clusters, centroids


def _control(run: Run, table: pa.Table) -> np.ndarray:
    config = run.config.partition
    if config.method == "label":
        return table["label"].to_numpy() * config.num_clusters // len(run.config.data.class_names)
    # Other bits than the ranks': rows of a shard are in an order that its cluster says nothing of.
    bits_N = ranks(f"{config.seed} {row_id}" for row_id in table["id"].to_pylist()) >> np.uint64(32)
    return ((bits_N * np.uint64(config.num_clusters)) >> np.uint64(32)).astype(np.int64)


def _balance(rows: Rows, features: Features, centroids: Centroids, clusters: Clusters, tell: Progress) -> Centroids:
    """Fine cells are shared out so that no cluster has more than its share of the training rows, exactly.

    Of a cell that is split each cluster takes a range of ranks; held-out rows go by the same ranges.
    """
    config = rows.run.config.partition
    num_fine = len(centroids.fine_FD)
    mass_F = np.zeros(num_fine, np.int64)
    for number, table in enumerate(rows.parts(COLUMNS[config.method], tell)):
        cells = np.empty(table.num_rows, CELLS)
        cells["fine"], cells["train"] = assign(features(table), centroids.fine_FD), trains(table)
        cells["rank"] = ranks(table["id"].to_pylist())
        mass_F += np.bincount(cells["fine"][cells["train"]], minlength=num_fine)
        _save(_cells(clusters, number), cells)
    assert config.max_share is not None
    most = capacity(int(mass_F.sum()), config.max_share, config.num_clusters)
    cost_FK = squared_distances(centroids.fine_FD, centroids.coarse_KD)
    # Centroids are of a sample under its own bound: under that of all rows one may be nobody's.
    quota_FK = none_empty(transport(mass_F, cost_FK, most), cost_FK)
    # A fine cell of held-out rows alone goes where it is nearest.
    whole_F = np.where(mass_F > 0, quota_FK.argmax(axis=1), assign(centroids.fine_FD, centroids.coarse_KD))
    split = np.flatnonzero((quota_FK > 0).sum(axis=1) > 1)
    ranks_of: dict[int, list[np.ndarray]] = {int(cell): [] for cell in split}
    for number in range(len(rows.names)):
        cells = np.load(_cells(clusters, number))
        for cell, found in ranks_of.items():
            found.append(cells["rank"][(cells["fine"] == cell) & cells["train"]])
    ends: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for cell, found in ranks_of.items():
        takers = np.flatnonzero(quota_FK[cell])
        firsts = np.cumsum(quota_FK[cell, takers])[:-1]
        ends[cell] = (takers, np.sort(np.concatenate(found))[firsts])
    for number in range(len(rows.names)):
        cells = np.load(_cells(clusters, number))
        cluster_N = whole_F[cells["fine"]]
        for cell, (takers, first_ranks) in ends.items():
            mine_N = cells["fine"] == cell
            cluster_N[mine_N] = takers[np.searchsorted(first_ranks, cells["rank"][mine_N], side="right")]
        clusters.put(number, cluster_N, cells["train"])
        _cells(clusters, number).unlink()
    assert clusters.rows_train_K.max() <= most
    return replace(centroids, fine_to_coarse_F=whole_F)


def _cells(clusters: Clusters, number: int) -> Path:
    return clusters.folder / f"cells-{number:07d}.npy"


def _save(path: Path, values: np.ndarray) -> None:
    with told(path.parent):
        np.save(path, values)
