"""Distances of rows that were appended from the centroids that there were, beside those of earlier rows.

N rows of a part, K clusters.
"""

from collections.abc import Sequence

import numpy as np

from ddm_ray.data import OnProgress
from ddm_ray.data.partition.assignment import nearest
from ddm_ray.data.partition.clustering import COLUMNS, Clustering, RowsReader
from ddm_ray.data.partition.numbers import FAR
from ddm_ray.data.schema import trains
from ddm_ray.storage.info import ClusterFit


def fits(
    new: RowsReader, earlier: Sequence[RowsReader], clustering: Clustering, on_progress: OnProgress
) -> tuple[ClusterFit, ...]:
    """The fit of each cluster, by training rows alone; takes 8 bytes of memory for each. Raises CorruptArtifact."""
    num_clusters = new.run.config.partition.num_clusters
    before = _distances(earlier, clustering, num_clusters, on_progress)
    after = _distances([new], clustering, num_clusters, on_progress)
    return tuple(_fit(*both) for both in zip(after, before, strict=True))


def _distances(
    several: Sequence[RowsReader], clustering: Clustering, num_clusters: int, on_progress: OnProgress
) -> list[np.ndarray]:
    """For each cluster the distances float32 of its training rows from its centroid."""
    parts: list[list[np.ndarray]] = [[np.empty(0, np.float32)] for _ in range(num_clusters)]
    for rows in several:
        for table in rows.parts(COLUMNS[rows.run.config.partition.method], on_progress):
            train_N, cluster_N = trains(table), nearest(clustering, table)
            distance_N = clustering.distances(table, cluster_N)
            for cluster in np.unique(cluster_N[train_N]):
                parts[cluster].append(distance_N[train_N & (cluster_N == cluster)])
    return [np.concatenate(each) for each in parts]


def _fit(after_N: np.ndarray, before_N: np.ndarray) -> ClusterFit:
    far = float(np.percentile(before_N, FAR)) if len(before_N) else None
    return ClusterFit(
        rows=len(after_N),
        distance=float(after_N.mean(dtype=np.float64)) if len(after_N) else None,
        rows_before=len(before_N),
        distance_before=float(before_N.mean(dtype=np.float64)) if len(before_N) else None,
        far_before=far,
        far=int((after_N > far).sum()) if far is not None else None,
    )
