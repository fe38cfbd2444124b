"""Distances between sets of feature vectors, and between frequencies. numpy, float64.

Shapes: N real rows, M samples, D features, K clusters.
"""

import numpy as np
from scipy.spatial.distance import cdist


def frechet(a_ND: np.ndarray, b_MD: np.ndarray) -> float:
    """Squared Frechet (Wasserstein-2) distance between Gaussians fitted to two sets, the form of FID.

    |mean_a - mean_b|^2 + tr(A + B - 2 (A^1/2 B A^1/2)^1/2). Grows as sets get smaller: compare at equal size.
    """
    a_ND, b_MD = np.asarray(a_ND, np.float64), np.asarray(b_MD, np.float64)
    mean_gap = a_ND.mean(0) - b_MD.mean(0)
    cov_a, cov_b = (np.atleast_2d(np.cov(rows, rowvar=False)) for rows in (a_ND, b_MD))
    root_a = _square_root(cov_a)
    # The trace of (A B)^1/2 by the symmetric form, whose eigenvalues are real also where A is singular.
    product = root_a @ cov_b @ root_a
    overlap = np.sqrt(np.clip(np.linalg.eigvalsh((product + product.T) / 2), 0, None)).sum()
    return float(max(mean_gap @ mean_gap + np.trace(cov_a) + np.trace(cov_b) - 2 * overlap, 0.0))


def frechet_std(real_ND: np.ndarray, samples_MD: np.ndarray, seed: int, draws: int = 20) -> float:
    """Standard deviation of `frechet` when the samples are drawn again with replacement."""
    random = np.random.default_rng(seed)
    resampled = (samples_MD[random.integers(len(samples_MD), size=len(samples_MD))] for _ in range(draws))
    return float(np.std([frechet(real_ND, rows) for rows in resampled], ddof=1))


def precision_recall(real_ND: np.ndarray, samples_MD: np.ndarray, neighbours: int = 3) -> tuple[float, float]:
    """Improved precision and recall (arXiv 1904.06991), both in [0, 1].

    Precision: the share of samples inside a ball around some real row that reaches its `neighbours`-th
    nearest real row. Recall: the same with the sets exchanged.
    """
    between_NM = cdist(real_ND, samples_MD)
    real_radius_N = _radius(real_ND, neighbours)
    sample_radius_M = _radius(samples_MD, neighbours)
    precision = (between_NM <= real_radius_N[:, None]).any(0).mean()
    recall = (between_NM <= sample_radius_M[None, :]).any(1).mean()
    return float(precision), float(recall)


def nearest(real_ND: np.ndarray, samples_MD: np.ndarray) -> np.ndarray:
    """Index (M,) of the real row nearest to each sample."""
    return cdist(samples_MD, real_ND).argmin(axis=1)


def total_variation(p_K: np.ndarray, q_K: np.ndarray) -> float:
    """Half the summed differences of two distributions: 0 equal, 1 disjoint."""
    return float(np.abs(np.asarray(p_K) - np.asarray(q_K)).sum() / 2)


def _square_root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T


def _radius(rows_ND: np.ndarray, neighbours: int) -> np.ndarray:
    # Column 0 of the partition is the row itself.
    kept = min(neighbours, len(rows_ND) - 1)
    return np.partition(cdist(rows_ND, rows_ND), kept, axis=1)[:, kept]
