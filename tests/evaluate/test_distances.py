"""Distances against closed forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from ddm_ray.evaluate.distances import Gaussian, RealNeighbours, between, nearest_rows, total_variation
from ddm_ray.evaluate.metrics import deviation


def exact(mean: np.ndarray, covariance: np.ndarray, count: int = 200, seed: int = 0) -> np.ndarray:
    """Rows whose sample mean and covariance are exactly these."""
    rows = np.random.default_rng(seed).normal(size=(count, len(mean)))
    rows -= rows.mean(0)
    rows = rows @ np.linalg.inv(np.linalg.cholesky(np.cov(rows, rowvar=False))).T
    values, vectors = np.linalg.eigh(covariance)
    return rows @ (vectors * np.sqrt(values)).T + mean


def frechet(a_ND: np.ndarray, b_MD: np.ndarray) -> float:
    return Gaussian.of(a_ND).measure(b_MD)[0]


def precision_recall(real_ND: np.ndarray, samples_MD: np.ndarray) -> tuple[float, float]:
    neighbourhood = RealNeighbours.of(real_ND).compare(samples_MD)
    return neighbourhood.precision, neighbourhood.recall


def test_frechet_of_shifted_sets_is_the_squared_shift() -> None:
    rows = np.random.default_rng(1).normal(size=(50, 3))
    assert frechet(rows, rows + np.array([3.0, 0.0, 4.0])) == pytest.approx(25)


def test_frechet_of_covariances_that_do_not_commute() -> None:
    """In two dimensions tr (AB)^1/2 = sqrt(tr AB + 2 sqrt(det AB))."""
    first, second = np.array([[3.0, 1.0], [1.0, 2.0]]), np.array([[1.0, -0.6], [-0.6, 4.0]])
    root_trace = np.sqrt(np.trace(first @ second) + 2 * np.sqrt(np.linalg.det(first @ second)))
    expected = np.trace(first) + np.trace(second) - 2 * root_trace
    assert frechet(exact(np.zeros(2), first), exact(np.zeros(2), second, seed=3)) == pytest.approx(expected)


def test_frechet_of_flat_sets_is_finite_and_symmetric() -> None:
    """Fewer rows than dimensions: singular covariances."""
    random = np.random.default_rng(4)
    a, b = random.normal(size=(5, 20)), random.normal(size=(8, 20))
    assert frechet(a, b) > 0
    assert frechet(a, b) == pytest.approx(frechet(b, a))


def test_frechet_deviation_is_that_of_the_mean_in_one_dimension() -> None:
    """Far apart, d = gap^2 to first order, so its deviation is 2 gap std / sqrt(n)."""
    random = np.random.default_rng(5)
    a, b = random.normal(size=(400, 1)), 100 + random.normal(size=(400, 1))
    gap, std = b.mean() - a.mean(), b.std(ddof=1)
    assert deviation(Gaussian.of(a).measure(b)[1]) == pytest.approx(2 * gap * std / np.sqrt(400), rel=0.02)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 8))
def test_pull_is_the_slope_of_the_distance(seed: int, width: int) -> None:
    """Against the distance of sets in which one row is there some more times."""
    random = np.random.default_rng(seed)
    gaussian = Gaussian.of(random.normal(size=(200, width)) @ random.normal(size=(width, width)) + random.normal())
    rows, row = random.normal(size=(2000, width)), int(random.integers(2000))
    more = np.concatenate([rows, np.repeat(rows[[row]], 2, axis=0)])
    distance, pull_M = gaussian.measure(rows)
    assert pull_M.mean() == pytest.approx(0, abs=1e-9 * np.abs(pull_M).max())
    slope = (gaussian.measure(more)[0] - distance) * len(more) / 2
    assert slope == pytest.approx(pull_M[row], rel=0.05, abs=0.05 * pull_M.std())


def test_deviation_is_that_of_sets_drawn_again() -> None:
    """Also where rows are in fewer dimensions than the space has."""
    random = np.random.default_rng(7)
    gaussian = Gaussian.of(random.normal(size=(300, 6)) @ random.normal(size=(6, 6)))
    for rows in (random.normal(size=(500, 6)) + 0.5, random.normal(size=(500, 4)) @ random.normal(size=(4, 6)) + 0.5):
        drawn = [gaussian.measure(rows[random.integers(500, size=500)])[0] for _ in range(300)]
        assert deviation(gaussian.measure(rows)[1]) == pytest.approx(np.std(drawn), rel=0.15)


def test_collapsed_samples_are_precise_and_recall_little() -> None:
    """Real rows 0, 1, .. 9; samples crowd about 0: all near real rows, while only row 0 is near them."""
    real = np.arange(10.0)[:, None]
    samples = np.linspace(-0.01, 0.01, 8)[:, None]
    assert precision_recall(real, samples) == (1.0, pytest.approx(0.1))
    assert precision_recall(samples, real) == (pytest.approx(0.1), 1.0)


def test_radius_reaches_the_kth_neighbour_and_no_further() -> None:
    """Row 0's third neighbour is at 3; rows 10, 11, .. are far. A sample at -3 is in, at -3.1 out."""
    real = np.array([0.0, 1.0, 2.0, 3.0])[:, None]
    samples = np.array([-3.0, -3.1, 6.0, 6.1])[:, None]
    assert precision_recall(real, samples)[0] == 0.5


def test_nearest_is_the_index_among_real_rows() -> None:
    assert nearest_rows(np.array([[0.0], [5.0], [9.0]]), np.array([[8.0], [1.0]])).tolist() == [2, 0]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), offset=st.sampled_from([0.0, 1.0, 1e3]))
def test_distances_are_those_of_each_pair(seed: int, offset: float) -> None:
    """Far from zero too; equal rows are at 0 exactly, and all rows that differ by a thousandth are not."""
    random = np.random.default_rng(seed)
    a, b = random.normal(size=(7, 300)) + offset, random.normal(size=(9, 300)) + offset
    b[2], b[3] = a[4], a[4] + 1e-3
    distances = between(a, b)
    assert distances == pytest.approx(cdist(a, b), rel=1e-6, abs=1e-6)
    assert distances[4, 2] == 0 < distances[4, 3]


def test_total_variation() -> None:
    assert total_variation(np.array([0.5, 0.5]), np.array([0.5, 0.5])) == 0
    assert total_variation(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 1
    assert total_variation(np.array([0.7, 0.2, 0.1]), np.array([0.4, 0.4, 0.2])) == pytest.approx(0.3)
