"""Distances between sets of feature vectors, and between frequencies. numpy, float64.

Shapes: N real rows, M samples, D features, K clusters.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

NEIGHBOURS, DENSITY_NEIGHBOURS = 3, 5
KID_ROWS = 1000
FLAT = 1e-10
"""Variances below this share of the largest one count as zero."""
ROUNDED = 1e-13
"""Squared distances below this share of the two rows' squared lengths are rounding errors."""
BLOCK = 512
"""Rows compared with all others at once; bounds the memory of their distances."""


@dataclass(frozen=True)
class Gaussian:
    """Mean and covariance of a set of rows, and the covariance's square root."""

    mean_D: np.ndarray
    covariance_DD: np.ndarray
    root_DD: np.ndarray

    @classmethod
    def of(cls, rows_ND: np.ndarray) -> "Gaussian":
        """Fit to at least 2 rows."""
        return cls.of_moments(*moments([rows_ND]))

    @classmethod
    def of_moments(cls, mean_D: np.ndarray, covariance_DD: np.ndarray) -> "Gaussian":
        """From a float64 mean and covariance."""
        values, vectors = np.linalg.eigh(covariance_DD)
        return cls(mean_D, covariance_DD, (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T)

    def measure(self, rows_MD: np.ndarray) -> tuple[float, np.ndarray]:
        """The distance to the rows, and the pull of each row on it (M,), of mean 0: its influence function.

        It is the squared Frechet (Wasserstein-2) distance to a Gaussian fitted to the rows, the form of FID:
        |mean_a - mean_b|^2 + tr(A + B - 2 (A^1/2 B A^1/2)^1/2). It grows as sets get smaller: compare at equal size.

        For other weights w_M of mean 1 the distance grows by mean(w pull) to first order, so its standard deviation is
        that of the pulls over sqrt(M) (Efron's infinitesimal jackknife). With T the map that takes the rows' Gaussian
        to this one, and c a row minus the rows' mean, a pull is |c|^2 - c T c - 2 c (mean - their mean), less its mean.
        """
        rows_MD = np.asarray(rows_MD, np.float64)
        their_D, other_DD = rows_MD.mean(0), np.atleast_2d(np.cov(rows_MD, rowvar=False))
        gap_D, centred_MD = self.mean_D - their_D, rows_MD - their_D
        # The trace of (A B)^1/2 by the symmetric form: its eigenvalues are real even if A is singular.
        product = self.root_DD @ other_DD @ self.root_DD
        values_D, vectors_DD = np.linalg.eigh((product + product.T) / 2)
        overlap = np.sqrt(np.clip(values_D, 0, None)).sum()
        distance = float(max(gap_D @ gap_D + np.trace(self.covariance_DD) + np.trace(other_DD) - 2 * overlap, 0.0))
        # Directions in which the rows don't vary have no slope, so they are dropped.
        kept_D = values_D > FLAT * values_D.max(initial=0.0)
        half_DD = self.root_DD @ (vectors_DD[:, kept_D] * values_D[kept_D] ** -0.25)
        spread_M = (centred_MD**2).sum(1) - ((centred_MD @ half_DD) ** 2).sum(1)
        return distance, spread_M - spread_M.mean() - 2 * centred_MD @ gap_D


def moments(parts: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and unbiased covariance, float64, of at least 2 rows in parts (B, D); one part is in memory at a time.

    Parts are merged by the update of Chan, Golub and LeVeque (1979): sums of squares about each part's own mean.
    """
    count, mean_D, scatter_DD = 0, np.zeros(1), np.zeros((1, 1))
    for part_BD in parts:
        rows_BD = np.asarray(part_BD, np.float64)
        if not len(rows_BD):
            continue
        own_D = rows_BD.mean(0)
        centred_BD, gap_D, total = rows_BD - own_D, own_D - mean_D, count + len(rows_BD)
        between_DD = np.outer(gap_D, gap_D) * (count * len(rows_BD) / total)
        scatter_DD = scatter_DD + centred_BD.T @ centred_BD + between_DD
        mean_D, count = mean_D + gap_D * (len(rows_BD) / total), total
    return mean_D, scatter_DD / (count - 1)


def kid(real_ND: np.ndarray, samples_MD: np.ndarray, seed: int, subsets: int = 50) -> tuple[float, float]:
    """Kernel distance (arXiv 1801.01401) and its standard deviation over subsets of at most KID_ROWS rows.

    Mean of the unbiased estimate of the squared maximum mean discrepancy under (a b / D + 1)^3; may be negative.
    Unlike the Frechet distance, it doesn't grow as sets get smaller.
    """
    random, size = np.random.default_rng(seed), min(KID_ROWS, len(real_ND), len(samples_MD))

    def drawn(rows_ND: np.ndarray) -> np.ndarray:
        return np.asarray(rows_ND[random.choice(len(rows_ND), size, replace=False)], np.float64)

    values = [_unbiased_mmd(drawn(real_ND), drawn(samples_MD)) for _ in range(subsets)]
    return float(np.mean(values)), float(np.std(values))


@dataclass(frozen=True)
class Neighbourhood:
    """Shares of samples and of real rows that are near each other; in [0, 1], except `density`.

    A ball around a row reaches to the k-th nearest other row of its own set: k is NEIGHBOURS for `precision` and
    `recall` (arXiv 1904.06991), DENSITY_NEIGHBOURS for `density` and `coverage` (arXiv 2002.09797). `precision`:
    samples in the ball of a real row. `recall`: real rows in the ball of a sample. `density`: mean number of real
    rows' balls that hold a sample, over k. `coverage`: real rows with a sample in their ball. `copied`: samples
    nearer to a training row than that row's nearest other training row (1 - authenticity, arXiv 2102.08921);
    somewhat more than a half for new rows of the same distribution.
    """

    precision: float
    recall: float
    density: float
    coverage: float
    copied: float


@dataclass(frozen=True)
class RealNeighbours:
    """Real rows, their distances to the nearest row that isn't equal, and the radii of both kinds of ball."""

    real_ND: np.ndarray
    nearest_N: np.ndarray
    radius_N: np.ndarray
    density_radius_N: np.ndarray

    @classmethod
    def of(cls, real_ND: np.ndarray) -> "RealNeighbours":
        """From at least 2 rows."""
        return cls(real_ND, _to_another(real_ND), *_radii(real_ND, (NEIGHBOURS, DENSITY_NEIGHBOURS)))

    def compare(self, samples_MD: np.ndarray) -> Neighbourhood:
        """Compare samples with the real rows, block by block, so that memory doesn't grow with N times M."""
        (sample_radius_M,) = _radii(samples_MD, (NEIGHBOURS,))
        real_covered_N, real_recalled_N = np.zeros((2, len(self.real_ND)), bool)
        precise = copied = balls = 0
        for first in range(0, len(samples_MD), BLOCK):
            between_BN = between(samples_MD[first : first + BLOCK], self.real_ND)
            precise += int((between_BN <= self.radius_N).any(1).sum())
            balls += int((between_BN <= self.density_radius_N).sum())
            real_covered_N |= (between_BN <= self.density_radius_N).any(0)
            real_recalled_N |= (between_BN <= sample_radius_M[first : first + BLOCK, None]).any(0)
            nearest_B = between_BN.argmin(axis=1)
            copied += int((between_BN[np.arange(len(nearest_B)), nearest_B] < self.nearest_N[nearest_B]).sum())
        num_samples, kept = len(samples_MD), min(DENSITY_NEIGHBOURS, len(self.real_ND) - 1)
        return Neighbourhood(
            precision=precise / num_samples,
            recall=float(real_recalled_N.mean()),
            density=balls / (kept * num_samples),
            coverage=float(real_covered_N.mean()),
            copied=copied / num_samples,
        )


def between(a_AD: np.ndarray, b_BD: np.ndarray) -> np.ndarray:
    """Euclidean distances (A, B), exact to a millionth of the rows' lengths; smaller ones are 0.

    One matrix product gives them all: pair by pair takes several times as long if D is large.
    """
    a_AD, b_BD = np.asarray(a_AD, np.float64), np.asarray(b_BD, np.float64)
    middle_D = b_BD.mean(0)  # rows far from zero would lose digits to cancellation
    a_AD, b_BD = a_AD - middle_D, b_BD - middle_D
    lengths_AB = (a_AD**2).sum(1)[:, None] + (b_BD**2).sum(1)
    squares_AB = lengths_AB - 2 * (a_AD @ b_BD.T)
    squares_AB[squares_AB < ROUNDED * lengths_AB] = 0
    return np.sqrt(squares_AB)


def nearest_rows(real_ND: np.ndarray, samples_MD: np.ndarray) -> np.ndarray:
    """Index (M,) of the real row nearest to each sample."""
    blocks = [samples_MD[first : first + BLOCK] for first in range(0, len(samples_MD), BLOCK)]
    return np.concatenate([between(block, real_ND).argmin(axis=1) for block in blocks])


def total_variation(p_K: np.ndarray, q_K: np.ndarray) -> float:
    """Half the summed absolute differences of two distributions: 0 if equal, 1 if disjoint."""
    return float(np.abs(np.asarray(p_K) - np.asarray(q_K)).sum() / 2)


def _radii(rows_ND: np.ndarray, ranks: tuple[int, ...]) -> list[np.ndarray]:
    """Distances (N,) from each row to its nearest others of these ranks, or to the farthest one in a smaller set."""
    # Column 0 of the partition is the row itself.
    kept = [min(rank, len(rows_ND) - 1) for rank in ranks]
    blocks = [
        np.partition(between(rows_ND[first : first + BLOCK], rows_ND), kept, axis=1)[:, kept]
        for first in range(0, len(rows_ND), BLOCK)
    ]
    return [*np.concatenate(blocks).T]


def _to_another(rows_ND: np.ndarray) -> np.ndarray:
    """Distance (N,) from each row to the nearest row that isn't equal to it; infinite if there is none."""
    blocks = []
    for first in range(0, len(rows_ND), BLOCK):
        between_BN = between(rows_ND[first : first + BLOCK], rows_ND)
        between_BN[between_BN == 0] = np.inf
        blocks.append(between_BN.min(axis=1))
    return np.concatenate(blocks)


def _unbiased_mmd(a_MD: np.ndarray, b_MD: np.ndarray) -> float:
    size, width = a_MD.shape
    within = 0.0
    for rows in (a_MD, b_MD):
        kernel = _cube(rows @ rows.T / width + 1)
        within += (kernel.sum() - np.trace(kernel)) / (size * (size - 1))
    return float(within - 2 * _cube(a_MD @ b_MD.T / width + 1).mean())


def _cube(matrix: np.ndarray) -> np.ndarray:
    return matrix * matrix * matrix  # ten times as fast as numpy's power
