import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linear_sum_assignment

from ddm_ray.core.balance import balanced, capacity, none_empty, squared_distances, transport


@settings(max_examples=60, deadline=None)
@given(
    masses=st.lists(st.one_of(st.just(0), st.integers(0, 50), st.integers(0, 10**9)), min_size=1, max_size=40),
    num_clusters=st.integers(1, 12),
    slack=st.floats(1.0, 3.0),
    spread=st.sampled_from([0.0, 1e-9, 1.0, 1e6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_row_has_a_place_and_no_cluster_too_many(masses, num_clusters, slack, spread, seed):
    mass_F = np.array(masses, np.int64)
    cost_FK = spread * np.random.default_rng(seed).random((len(masses), num_clusters)) ** 3
    max_share = min(1.0, slack / num_clusters)
    most = capacity(int(mass_F.sum()), max_share, num_clusters)
    quota_FK = transport(mass_F, cost_FK, most)
    assert quota_FK.dtype == np.int64
    assert (quota_FK >= 0).all()
    assert (quota_FK.sum(axis=1) == mass_F).all()
    assert (quota_FK.sum(axis=0) <= most).all()


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_is_that_of_the_best_assignment_of_single_rows(seed):
    generator = np.random.default_rng(seed)
    mass_F, cost_FK = generator.integers(0, 6, 12), generator.random((12, 3))
    most = -(-int(mass_F.sum()) // 3)
    quota_FK = transport(mass_F, cost_FK, most)
    single = np.repeat(np.repeat(cost_FK, mass_F, axis=0), most, axis=1)
    rows, places = linear_sum_assignment(single)
    assert (quota_FK * cost_FK).sum() == pytest.approx(single[rows, places].sum(), rel=1e-9)


def test_with_room_for_all_each_cell_goes_to_its_nearest_and_few_are_split_without():
    generator = np.random.default_rng(0)
    mass_F, cost_FK = generator.integers(1, 1000, 300), generator.random((300, 8))
    roomy_FK = transport(mass_F, cost_FK, int(mass_F.sum()))
    assert (roomy_FK.argmax(axis=1) == cost_FK.argmin(axis=1)).all()
    assert ((roomy_FK > 0).sum(axis=1) == 1).all()
    tight_FK = transport(mass_F, cost_FK, -(-int(mass_F.sum()) // 8))
    assert (tight_FK > 0).sum() <= 300 + 8 - 1


@pytest.mark.parametrize(
    ("num_rows", "max_share", "num_clusters", "most"),
    [(100, 0.29, 4, 29), (10, 1 / 3, 3, 4), (9, 1 / 3, 3, 3), (1000, 0.125, 8, 125), (7, 1.0, 2, 7), (30, 0.1, 10, 3)],
)
def test_the_capacity_is_the_share_as_it_was_written(num_rows, max_share, num_clusters, most):
    assert (
        capacity(num_rows, max_share, num_clusters) == capacity(num_rows, np.float64(max_share), num_clusters) == most
    )


def test_coarse_centroids_move_to_the_rows_they_are_given():
    # Nine tenths of the mass about the first centroid: under a bound of half, the second must come near.
    fine_FD = np.concatenate([np.linspace(0, 1, 20), np.linspace(9, 10, 20)])[:, None].astype(np.float32)
    mass_F = np.repeat([90, 10], 20)
    before_KD = np.array([[0.5], [9.5]], np.float32)
    coarse_KD, quota_FK = balanced(fine_FD, mass_F, before_KD, 0.5, spherical=False)
    assert quota_FK.sum(axis=0).tolist() == [1000, 1000]
    means_K = (quota_FK.T @ fine_FD)[:, 0] / 1000
    np.testing.assert_allclose(coarse_KD[:, 0], means_K, rtol=1e-6)
    first = transport(mass_F, squared_distances(fine_FD, before_KD), 1000)
    assert (quota_FK * squared_distances(fine_FD, coarse_KD)).sum() < (
        first * squared_distances(fine_FD, before_KD)
    ).sum()


@given(arrays(np.int64, (4, 6), elements=st.integers(0, 3)), st.integers(0, 99))
def test_an_empty_cluster_is_given_the_row_that_costs_least(quota_FK, seed):
    cost_FK = np.random.default_rng(seed).random((4, 6))
    actual_FK = none_empty(quota_FK, cost_FK)
    assert (actual_FK >= 0).all()
    assert actual_FK.sum(axis=1).tolist() == quota_FK.sum(axis=1).tolist()
    before_K, after_K = quota_FK.sum(axis=0), actual_FK.sum(axis=0)
    assert np.count_nonzero(after_K) == min(6, quota_FK.sum())
    assert (after_K[before_K == 0] <= 1).all()
    if (before_K > 0).all():
        assert (actual_FK == quota_FK).all()
    if np.count_nonzero(before_K == 0) == 1 and before_K.max() > 1:
        moves = [
            cost_FK[cell, before_K.argmin()] - cost_FK[cell, giver]
            for cell, giver in np.argwhere((quota_FK > 0) & (before_K > 1))
        ]
        cost = ((actual_FK - quota_FK) * cost_FK).sum()
        np.testing.assert_allclose(cost, min(moves), atol=1e-12)
