"""Two-level k-means: embeddings -> fine centroids -> coarse ones, the clusters (paper, section 4).

N rows, D dimensions of an embedding, F fine centroids, K clusters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import faiss
import numpy as np

from ddm_ray.errors import DataError

COARSE_RESTARTS = 5


@dataclass(frozen=True)
class Centroids:
    """fine_FD and coarse_KD float32; fine_to_coarse_F int64 in 0..K-1. F may be lower than asked for."""

    fine_FD: np.ndarray
    coarse_KD: np.ndarray
    fine_to_coarse_F: np.ndarray


def two_level_kmeans(
    embeddings_ND: np.ndarray, num_fine: int, num_clusters: int, iterations: int, seed: int
) -> Centroids:
    """Fine k-means of the rows, then k-means of the fine centroids; equal input gives equal bits.

    At most N // 2 fine centroids are used, but never fewer than K. Raises DataError for fewer rows than K.
    """
    num_rows = len(embeddings_ND)
    if num_rows < num_clusters:
        raise DataError(f"{num_rows} training rows can't fill {num_clusters} clusters; lower partition.num_clusters")
    num_fine = min(num_fine, max(num_clusters, num_rows // 2))
    with _one_thread():
        fine_FD = _kmeans(embeddings_ND, num_fine, iterations, seed, restarts=1)
        # Few points, so restarts cost nothing and spare the clusters an unlucky beginning.
        coarse_KD = _kmeans(fine_FD, num_clusters, iterations, seed, COARSE_RESTARTS)
    return Centroids(fine_FD, coarse_KD, assign(fine_FD, coarse_KD))


def assign(embeddings_ND: np.ndarray, coarse_KD: np.ndarray) -> np.ndarray:
    """cluster_N int64: index of each row's nearest coarse centroid (Euclidean)."""
    with _one_thread():
        _, nearest_N1 = faiss.knn(_rows(embeddings_ND), _rows(coarse_KD), 1)
    cluster_N: np.ndarray = nearest_N1[:, 0]
    assert (cluster_N >= 0).all(), "embeddings must be finite"
    return cluster_N


def _kmeans(points_ND: np.ndarray, k: int, iterations: int, seed: int, restarts: int) -> np.ndarray:
    kmeans = faiss.Kmeans(
        points_ND.shape[1],
        k,
        niter=iterations,
        nredo=restarts,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(points_ND),  # faiss would draw a subsample of its own
    )
    kmeans.train(_rows(points_ND))
    assert kmeans.centroids is not None
    return np.asarray(kmeans.centroids)


def _rows(points_ND: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(points_ND, dtype=np.float32)


@contextmanager
def _one_thread() -> Iterator[None]:
    # With several threads faiss sums in an order of their own making: other bits on every run.
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)
