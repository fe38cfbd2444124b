"""Distances and neighbourhoods against plain formulas, and what must hold of them for any sets."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from sklearn.metrics.pairwise import euclidean_distances, polynomial_kernel

from ddm_ray.evaluate.distances import BLOCK, KID_ROWS, Gaussian, RealNeighbours, kid


def sets(seed: int, num_real: int, num_samples: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(num_real, width)), 0.8 * random.normal(size=(num_samples, width)) + 0.2


def plain_neighbourhood(real: np.ndarray, samples: np.ndarray) -> tuple[float, ...]:
    """All five from whole matrices of distances, as their papers write them."""
    between = euclidean_distances(real, samples)
    of_real, of_samples = (np.sort(euclidean_distances(rows), axis=1) for rows in (real, samples))
    owner = between.argmin(axis=0)
    return (
        (between < of_real[:, [3]]).any(axis=0).mean(),
        (between < of_samples[:, 3]).any(axis=1).mean(),
        (between < of_real[:, [5]]).sum(axis=0).mean() / 5,
        (between.min(axis=1) < of_real[:, 5]).mean(),
        (between.min(axis=0) < of_real[owner, 1]).mean(),
    )


@pytest.mark.parametrize(("num_real", "num_samples"), [(2 * BLOCK + 70, 600), (90, BLOCK + 1), (40, 40)])
def test_neighbourhoods_are_those_of_whole_matrices(num_real: int, num_samples: int) -> None:
    real, samples = sets(1, num_real, num_samples, 5)
    shares = astuple(RealNeighbours.of(real).compare(samples))
    assert shares == pytest.approx(plain_neighbourhood(real, samples), rel=1e-9)
    assert len({*shares}) == 5 and all(0 < value < 1.5 for value in shares)


def test_frechet_is_that_of_the_matrix_root() -> None:
    real, samples = sets(2, 900, 700, 24)
    covs = [np.cov(rows, rowvar=False) for rows in (real, samples)]
    gap = real.mean(0) - samples.mean(0)
    expected = gap @ gap + np.trace(covs[0] + covs[1] - 2 * sqrtm(covs[0] @ covs[1]).real)
    assert Gaussian.of(real).measure(samples)[0] == pytest.approx(expected, rel=1e-9)


def test_kid_is_the_unbiased_estimate_where_a_subset_is_all() -> None:
    real, samples = sets(3, 300, 300, 7)
    within = 0.0
    for rows in (real, samples):
        kernel = polynomial_kernel(rows, degree=3, gamma=1 / 7, coef0=1)
        within += (kernel.sum() - np.trace(kernel)) / (300 * 299)
    expected = within - 2 * polynomial_kernel(real, samples, degree=3, gamma=1 / 7, coef0=1).mean()
    value, deviation = kid(real, samples, seed=0, subsets=3)
    assert value == pytest.approx(expected, rel=1e-9) and deviation == pytest.approx(0, abs=1e-9)


def test_kid_of_one_distribution_is_zero_within_its_error_at_any_size() -> None:
    random = np.random.default_rng(4)
    real = random.normal(size=(4000, 6))
    for count in (200, KID_ROWS + 500):
        value, deviation = kid(real, random.normal(size=(count, 6)), seed=1)
        assert abs(value) < 3 * deviation
    shifted, _ = kid(real, random.normal(size=(200, 6)) + 0.5, seed=1)
    assert shifted > 10 * abs(value)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 30), st.integers(2, 30), st.integers(1, 4))
def test_order_does_not_matter_and_a_set_is_in_its_own_neighbourhood(seed: int, n: int, m: int, width: int) -> None:
    real, samples = sets(seed, n, m, width)
    order = np.random.default_rng(seed).permutation
    shares = astuple(RealNeighbours.of(real).compare(samples))
    assert astuple(RealNeighbours.of(real[order(n)]).compare(samples[order(m)])) == pytest.approx(shares)
    own = RealNeighbours.of(real).compare(real)
    assert (own.precision, own.recall, own.coverage, own.copied) == (1, 1, 1, 1) and own.density >= 1 - 1e-9
    doubled = RealNeighbours.of(real).compare(np.concatenate([samples, samples]))
    assert (doubled.precision, doubled.density, doubled.coverage, doubled.copied) == pytest.approx(
        (shares[0], shares[2], shares[3], shares[4])
    )
    far = RealNeighbours.of(real).compare(samples + 1e6)
    assert astuple(far) == (0, 0, 0, 0, 0)


def test_new_rows_of_the_same_distribution_are_copied_for_a_half_or_so() -> None:
    random = np.random.default_rng(5)
    real, new = random.normal(size=(2, 1500, 3))
    assert 0.5 < RealNeighbours.of(real).compare(new).copied < 0.65
    near = real[:700] + 0.01 * random.normal(size=(700, 3))
    assert RealNeighbours.of(real).compare(near).copied > 0.9
