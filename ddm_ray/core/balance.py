"""Clusters of bounded size: fine cells' rows go to coarse centroids at least squared distance, under a capacity.

F fine cells, K clusters, D dimensions.
"""

from fractions import Fraction

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

ROUNDS = 10


def capacity(num_rows: int, max_share: float, num_clusters: int) -> int:
    """Most rows of a cluster: max_share of them rounded down, but never fewer than all rows need."""
    return max(int(Fraction(repr(max_share)) * num_rows), -(-num_rows // num_clusters))


def transport(mass_F: np.ndarray, cost_FK: np.ndarray, most: int) -> np.ndarray:
    """quota_FK int64: how many of cell f's mass_F[f] rows go to cluster k, at least total cost (>= 0 a row).

    Rows sum to mass_F and no column exceeds `most`, exactly; at most K - 1 cells are split. K * most >= sum(mass_F).
    """
    num_cells, num_clusters = cost_FK.shape
    assert num_clusters * most >= mass_F.sum(), "the rows don't fit"
    unit = max(1.0, mass_F.sum() / num_cells)  # the solver's tolerances are absolute: amounts near 1 suit it
    solved = linprog(
        (cost_FK / max(cost_FK.max(), np.finfo(np.float64).tiny)).ravel(),
        A_eq=sparse.kron(sparse.eye_array(num_cells), np.ones((1, num_clusters)), format="csr"),
        b_eq=mass_F / unit,
        A_ub=sparse.kron(np.ones((1, num_cells)), sparse.eye_array(num_clusters), format="csr"),
        b_ub=np.full(num_clusters, most / unit),
        method="highs-ds",  # a vertex of the polytope: whole numbers, and few cells split
    )
    # The solver's answer is whole up to its tolerance; what rounding takes away or adds is settled here.
    assert solved.status in (0, 1, 4), solved.message
    near_FK = np.zeros_like(cost_FK) if solved.x is None else solved.x.reshape(cost_FK.shape) * unit
    return _settled(np.floor(near_FK + 1e-3).clip(0).astype(np.int64), mass_F, cost_FK, most)


def none_empty(quota_FK: np.ndarray, cost_FK: np.ndarray) -> np.ndarray:
    """The quotas where each cluster has a row at least, if there are so many: one at least cost for each empty one."""
    quota_FK = quota_FK.copy()
    for cluster in np.flatnonzero(quota_FK.sum(axis=0) == 0):
        gives_FK = (quota_FK > 0) & (quota_FK.sum(axis=0) > 1)
        if not gives_FK.any():
            break
        more_FK = np.where(gives_FK, cost_FK[:, [cluster]] - cost_FK, np.inf)
        cell, giver = np.unravel_index(more_FK.argmin(), more_FK.shape)
        quota_FK[cell, giver] -= 1
        quota_FK[cell, cluster] += 1
    return quota_FK


def _settled(quota_FK: np.ndarray, mass_F: np.ndarray, cost_FK: np.ndarray, most: int) -> np.ndarray:
    for cell in np.flatnonzero(quota_FK.sum(axis=1) > mass_F):
        _take(quota_FK[cell], int(quota_FK[cell].sum() - mass_F[cell]))
    for cluster in np.flatnonzero(quota_FK.sum(axis=0) > most):
        _take(quota_FK[:, cluster], int(quota_FK[:, cluster].sum() - most))
    free_K = most - quota_FK.sum(axis=0)
    left_F = mass_F - quota_FK.sum(axis=1)
    for cell in np.flatnonzero(left_F):
        for cluster in np.argsort(cost_FK[cell], kind="stable"):
            given = min(left_F[cell], free_K[cluster])
            quota_FK[cell, cluster] += given
            left_F[cell] -= given
            free_K[cluster] -= given
    assert not left_F.any() and (free_K >= 0).all()
    return quota_FK


def _take(quotas: np.ndarray, surplus: int) -> None:
    while surplus > 0:
        largest = int(quotas.argmax())
        taken = min(surplus, int(quotas[largest]))
        quotas[largest] -= taken
        surplus -= taken


def squared_distances(fine_FD: np.ndarray, coarse_KD: np.ndarray) -> np.ndarray:
    """cost_FK float64."""
    fine_FD, coarse_KD = fine_FD.astype(np.float64), coarse_KD.astype(np.float64)
    return np.stack([((fine_FD - centre_D) ** 2).sum(axis=1) for centre_D in coarse_KD], axis=1)


def balanced(
    fine_FD: np.ndarray, mass_F: np.ndarray, coarse_KD: np.ndarray, max_share: float, spherical: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(coarse_KD float32, quota_FK): transport and re-estimation of the coarse centroids by turns, until it settles."""
    most = capacity(int(mass_F.sum()), max_share, len(coarse_KD))
    quota_FK = transport(mass_F, squared_distances(fine_FD, coarse_KD), most)
    for _ in range(ROUNDS):
        sums_KD = quota_FK.T.astype(np.float64) @ fine_FD
        size_K = np.linalg.norm(sums_KD, axis=1) if spherical else quota_FK.sum(axis=0)
        held_K = size_K > 0
        moved_KD = coarse_KD.copy()
        moved_KD[held_K] = sums_KD[held_K] / size_K[held_K, None]
        moved_FK = transport(mass_F, squared_distances(fine_FD, moved_KD), most)
        coarse_KD = moved_KD
        if (moved_FK == quota_FK).all():
            break
        quota_FK = moved_FK
    return coarse_KD, quota_FK
