"""Clusters of bounded size: the rows of fine cells go to coarse centroids at least squared distance, under a capacity.

F fine cells, K clusters, D dimensions.
"""

from fractions import Fraction

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

MAX_ROUNDS = 10


def capacity(num_rows: int, max_share: float, num_clusters: int) -> int:
    """Maximum rows of a cluster: `max_share` (0 to 1) of all rows rounded down, but enough for K such clusters."""
    return max(int(Fraction(repr(float(max_share))) * num_rows), -(-num_rows // num_clusters))


def transport(mass_F: np.ndarray, cost_FK: np.ndarray, most: int) -> np.ndarray:
    """The transportation problem's solution quota_FK (int64): rows of cell f, mass_F[f] in all, that go to cluster k.

    It has the least total cost, cost_FK >= 0 a row, by HiGHS' dual simplex. Rows sum to mass_F and no column exceeds
    `most`, exactly; at most K - 1 cells are split. K * most must be sum(mass_F) or more.
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
    # Solved, out of iterations or short of precision: `_integral` mends whatever quotas there are.
    assert solved.status in (0, 1, 4), solved.message
    near_FK = np.zeros_like(cost_FK) if solved.x is None else solved.x.reshape(cost_FK.shape) * unit
    return _integral(np.floor(near_FK + 1e-3).clip(0).astype(np.int64), mass_F, cost_FK, most)


def none_empty(quota_FK: np.ndarray, cost_FK: np.ndarray) -> np.ndarray:
    """Quotas with a row in every cluster, as far as there are rows: an empty one takes the row that costs least."""
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


def _integral(quota_FK: np.ndarray, mass_F: np.ndarray, cost_FK: np.ndarray, most: int) -> np.ndarray:
    """The solver's quotas, integers up to its tolerance before rounding, made to meet both bounds exactly."""
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
    """cost_FK float64, between fine and coarse centroids."""
    fine_FD, coarse_KD = fine_FD.astype(np.float64), coarse_KD.astype(np.float64)
    return np.stack([((fine_FD - centre_D) ** 2).sum(axis=1) for centre_D in coarse_KD], axis=1)


def balanced(
    fine_FD: np.ndarray, mass_F: np.ndarray, coarse_KD: np.ndarray, max_share: float, spherical: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Constrained k-means (Bradley, Bennett and Demiriz 2000, MSR-TR-2000-65) of the fine cells, from `coarse_KD`.

    Transport and means take turns until no quota changes, MAX_ROUNDS times at most. Returns (coarse_KD float32,
    quota_FK int64).
    """
    most = capacity(int(mass_F.sum()), max_share, len(coarse_KD))
    quota_FK = transport(mass_F, squared_distances(fine_FD, coarse_KD), most)
    for _ in range(MAX_ROUNDS):
        sums_KD = quota_FK.T.astype(np.float64) @ fine_FD
        size_K = np.linalg.norm(sums_KD, axis=1) if spherical else quota_FK.sum(axis=0)
        # Unit vectors that cancel have no mean direction: their centroid stays.
        held_K = size_K > 0
        moved_KD = coarse_KD.copy()
        moved_KD[held_K] = sums_KD[held_K] / size_K[held_K, None]
        moved_FK = transport(mass_F, squared_distances(fine_FD, moved_KD), most)
        coarse_KD = moved_KD
        if (moved_FK == quota_FK).all():
            break
        quota_FK = moved_FK
    return coarse_KD, quota_FK
