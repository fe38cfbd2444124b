"""Two-level k-means: embeddings -> fine centroids -> coarse ones, the clusters (paper, section 4).

N rows, D dimensions of an embedding, F fine centroids, K clusters; B rows of a block.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import numpy as np
from scipy import sparse
from threadpoolctl import ThreadpoolController

from ddm_ray.core.balance import balanced
from ddm_ray.errors import ConfigError, DataError

Metric = Literal["euclidean", "spherical"]
COARSE_RESTARTS = 5
BLOCK = 4096
SCORES = 2**20
"""Values of a matrix product that are made at once: they stay in a core's cache until they are compared."""
TIE = 1e-5
"""Squared distances nearer than this share of the squared lengths are compared again in float64."""
MAX_SQUARED_LENGTH = float(np.finfo(np.float32).max) / 16
"""Distances between rows no longer than this, about their mean or not, are finite in float32."""


@dataclass(frozen=True)
class Centroids:
    """fine_FD and coarse_KD float32; fine_to_coarse_F int64 in 0..K-1. F may be lower than asked for.

    Spherical ones have unit length, and stand for embeddings scaled to it.
    """

    fine_FD: np.ndarray
    coarse_KD: np.ndarray
    fine_to_coarse_F: np.ndarray


def two_level_kmeans(
    embeddings_ND: np.ndarray,
    num_fine: int,
    num_clusters: int,
    iterations: int,
    seed: int,
    metric: Metric = "euclidean",
    max_share: float | None = None,
) -> Centroids:
    """Fine k-means of the rows, then k-means of the fine centroids; equal rows in equal order give equal bits.

    At most N // 2 fine centroids are used, but never fewer than K. `max_share`: the coarse centroids are those of
    clusters that hold at most this share of the rows. Raises DataError for fewer different rows than K, for rows that
    aren't finite or are too long to have distances (spherical ones may be long), and, if spherical, for rows without
    length; ConfigError for fewer iterations than 1.
    """
    num_rows, spherical = len(embeddings_ND), metric == "spherical"
    if num_rows < num_clusters:
        raise DataError(
            f"{num_rows} training rows can't fill {num_clusters} clusters; use fewer partition.num_clusters"
        )
    if iterations < 1:
        raise ConfigError(f"k-means of {iterations} iterations has no centroids; use partition.iterations of 1 or more")
    # Spherical rows are scaled to length 1 before distances: only their float64 length must be finite.
    for begin, block_BD in zip(range(0, num_rows, BLOCK), _blocks(embeddings_ND), strict=True):
        if spherical:
            _squared_lengths(block_BD.astype(np.float64), np.inf, begin)
        else:
            _squared_lengths(_float32(block_BD), first_row=begin)
    num_fine = max(num_clusters, min(num_fine, num_rows // 2))
    with _threads() as pool:
        drawn = np.random.default_rng(seed).choice(num_rows, num_fine, replace=False)
        fine = _kmeans(pool, embeddings_ND, drawn, iterations, spherical)
        if len(fine.centroids_KD) < num_clusters:
            raise DataError(
                f"{num_clusters} clusters need as many different embeddings, and {len(fine.centroids_KD)} were found;"
                " use fewer partition.num_clusters"
            )
        # Few points, so restarts cost nothing and spare the clusters an unlucky beginning.
        generator = np.random.default_rng([seed, 1])
        tries = [
            _kmeans(pool, fine.centroids_KD, _seed(fine.centroids_KD, num_clusters, generator), iterations, spherical)
            for _ in range(COARSE_RESTARTS)
        ]
    coarse_KD = min(tries, key=lambda fit: (-len(fit.centroids_KD), fit.loss)).centroids_KD
    if len(coarse_KD) < num_clusters:
        raise DataError(
            f"only {len(coarse_KD)} clusters of {num_clusters} were found; use fewer partition.num_clusters"
        )
    if max_share is None:
        return Centroids(fine.centroids_KD, coarse_KD, assign(fine.centroids_KD, coarse_KD))
    coarse_KD, quota_FK = balanced(fine.centroids_KD, fine.mass_K, coarse_KD, max_share, spherical)
    return Centroids(fine.centroids_KD, coarse_KD, quota_FK.argmax(axis=1))


def assign(points_ND: np.ndarray, centroids_KD: np.ndarray) -> np.ndarray:
    """nearest_N int64: index of each row's nearest centroid (Euclidean), the lower of two that are equally near.

    A row's index doesn't depend on the rows beside it or on threads. Raises DataError for rows that aren't
    finite or are too long to have distances.
    """
    centroids_KD = _float32(centroids_KD)
    _squared_lengths(centroids_KD)
    middle_D = centroids_KD.mean(axis=0)  # distances lose fewer digits about it
    points_ND, centred_KD = _float32(points_ND) - middle_D, centroids_KD - middle_D
    length_N = _squared_lengths(points_ND)
    if not len(points_ND) or len(centroids_KD) == 1:
        return np.zeros(len(points_ND), np.int64)
    with _threads() as pool:
        blocks = list(pool.map(partial(_nearest, centroids_KD=centred_KD), _blocks(points_ND)))
    nearest_N, second_N, lead_N = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    # A matrix product rounds by a row's place in its block, which decides between centroids that are as good as equal.
    length_K = np.einsum("kd,kd->k", centred_KD, centred_KD)
    scale_N = length_N + np.maximum(length_K[nearest_N], length_K[second_N])
    centres_KD = centred_KD.astype(np.float64)
    for row in np.flatnonzero(lead_N <= TIE * scale_N):
        nearest_N[row] = ((centres_KD - points_ND[row]) ** 2).sum(axis=1).argmin()
    return nearest_N


def unit_length(points_ND: np.ndarray) -> np.ndarray:
    """The rows scaled to length 1, float32. Raises DataError if one has none."""
    length_N1 = np.sqrt(np.einsum("nd,nd->n", points_ND, points_ND, dtype=np.float64))[:, None]
    if not length_N1.all():
        raise DataError("an embedding of nothing but zeros has no direction; use partition.metric euclidean")
    return (points_ND / length_N1).astype(np.float32)


@dataclass(frozen=True)
class _Fit:
    centroids_KD: np.ndarray
    mass_K: np.ndarray
    loss: float


def _seed(points_ND: np.ndarray, k: int, generator: np.random.Generator) -> np.ndarray:
    """k-means++ (Arthur and Vassilvitskii 2007): k different rows, drawn by squared distance to those drawn before.

    Fewer, if fewer differ.
    """
    points_ND = points_ND.astype(np.float64)
    chosen = [int(generator.integers(len(points_ND)))]
    distance_N = np.full(len(points_ND), np.inf)
    while len(chosen) < k:
        distance_N = np.minimum(distance_N, ((points_ND - points_ND[chosen[-1]]) ** 2).sum(axis=1))
        if not distance_N.any():
            break
        chosen.append(int(generator.choice(len(points_ND), p=distance_N / distance_N.sum())))
    return np.array(chosen)


def _kmeans(
    pool: ThreadPoolExecutor, points_ND: np.ndarray, first_K: np.ndarray, iterations: int, spherical: bool
) -> _Fit:
    """Lloyd's algorithm (Lloyd 1982) from the rows first_K; centroids that have no row in the end are left out.

    Blocks are the same whatever the threads, and their sums are taken in the order of the rows.
    """
    k = len(first_K)

    def step(block_BD: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        block_BD = unit_length(block_BD) if spherical else _float32(block_BD)
        nearest, distances = [], []
        for part_PD, score_PK in _scores(block_BD - middle_D, centroids_KD - middle_D):
            nearest.append(score_PK.argmax(axis=1))
            best_P = score_PK[np.arange(len(part_PD)), nearest[-1]]
            distances.append((np.einsum("pd,pd->p", part_PD, part_PD) - 2 * best_P).clip(min=0))
        nearest_B = np.concatenate(nearest)
        ones = (np.ones(len(block_BD), np.float32), nearest_B, np.arange(len(block_BD) + 1))
        sums_KD = sparse.csr_array(ones, shape=(len(block_BD), k)).T @ block_BD
        return nearest_B, np.concatenate(distances), sums_KD

    centroids_KD = unit_length(points_ND[first_K]) if spherical else _float32(points_ND[first_K])
    before_N = np.empty(0)
    for left in reversed(range(iterations)):
        nearest, distances, sums_KD = [], [], np.zeros(centroids_KD.shape)
        # Distances lose fewer digits about the middle; not the mean, which one long row would move.
        middle_D = np.median(centroids_KD, axis=0)
        for nearest_B, distance_B, part_KD in pool.map(step, _blocks(points_ND)):
            nearest.append(nearest_B)
            distances.append(distance_B)
            sums_KD += part_KD
        nearest_N, distance_N = np.concatenate(nearest), np.concatenate(distances)
        mass_K = np.bincount(nearest_N, minlength=k)
        # Unit vectors that cancel have no mean direction: their centroid stays.
        size_K = np.linalg.norm(sums_KD, axis=1) if spherical else mass_K
        held_K = (mass_K > 0) & (size_K > 0)
        centroids_KD = centroids_KD.copy()
        centroids_KD[held_K] = sums_KD[held_K] / size_K[held_K, None]
        empty = np.flatnonzero(mass_K == 0)
        if not left or np.array_equal(nearest_N, before_N):
            break
        if len(empty):
            # An empty one begins again at a row that is far from its own.
            far = np.argsort(-distance_N, kind="stable")[: len(empty)]
            centroids_KD[empty] = unit_length(points_ND[far]) if spherical else _float32(points_ND[far])
        before_N = nearest_N
    return _Fit(centroids_KD[mass_K > 0], mass_K[mass_K > 0], float(distance_N.sum(dtype=np.float64)))


def _squared_lengths(points_ND: np.ndarray, most: float = MAX_SQUARED_LENGTH, first_row: int = 0) -> np.ndarray:
    """length_N; DataError for a row beyond `most` or not finite, which has no nearest centroid."""
    length_N: np.ndarray = np.einsum("nd,nd->n", points_ND, points_ND)
    broken_N = ~(length_N < most)  # NaN too
    if broken_N.any():
        row = int(broken_N.argmax())
        raise DataError(
            f"row {first_row + row} of the embeddings has no distances: its largest value is"
            f" {np.abs(points_ND[row]).max():.3g}; leave it out, or check the embedder"
        )
    return length_N


def _nearest(block_BD: np.ndarray, centroids_KD: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(nearest_B, second_B, lead_B): the two nearest of several centroids, and their squared distances' difference."""
    nearest, second, lead = [], [], []
    for part_PD, score_PK in _scores(block_BD, centroids_KD):
        row_P = np.arange(len(part_PD))
        nearest.append(score_PK.argmax(axis=1))
        best_P = score_PK[row_P, nearest[-1]]
        score_PK[row_P, nearest[-1]] = -np.inf
        second.append(score_PK.argmax(axis=1))
        lead.append(2 * (best_P - score_PK[row_P, second[-1]]))
    return np.concatenate(nearest), np.concatenate(second), np.concatenate(lead)


def _scores(block_BD: np.ndarray, centroids_KD: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(part_PD, score_PK) of a block's rows, SCORES at a time: half of a row's squared length less its distance's.

    The highest is that of the nearest, the first of those that are equal: one matrix product, and a look at it.
    """
    half_K = np.einsum("kd,kd->k", centroids_KD, centroids_KD) / 2
    rows = max(1, SCORES // len(centroids_KD))
    for begin in range(0, len(block_BD), rows):
        part_PD = block_BD[begin : begin + rows]
        score_PK = part_PD @ centroids_KD.T
        score_PK -= half_K
        yield part_PD, score_PK


def _blocks(points_ND: np.ndarray) -> Iterator[np.ndarray]:
    return (points_ND[begin : begin + BLOCK] for begin in range(0, len(points_ND), BLOCK))


def _float32(points_ND: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(points_ND, dtype=np.float32)


@cache
def _products() -> ThreadpoolController:
    """The libraries that make numpy's matrix products."""
    return ThreadpoolController().select(user_api="blas")


_alone = threading.RLock()  # a library's number of threads is one for all of the process


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Open a pool of as many threads as a matrix product would use; meanwhile it uses one in each.

    Several threads of its own would round otherwise than one. Calls from several threads come one after the other.
    """
    with _alone:
        number = max((library["num_threads"] for library in _products().info()), default=1)
        with _products().limit(limits=1), ThreadPoolExecutor(number) as pool:
            yield pool
