import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from ddm_ray.core.kmeans import assign, two_level_kmeans, unit_length
from ddm_ray.errors import ConfigError, DataError

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[2]
CENTRES_KD = np.array([[0, 0, 9], [0, 9, 0], [9, 0, 0], [-9, -9, -9]], np.float32)


def blobs(per_blob: int = 200) -> tuple[np.ndarray, np.ndarray]:
    truth_N = np.repeat(np.arange(4), per_blob)
    noise_ND = np.random.default_rng(0).standard_normal((len(truth_N), 3), dtype=np.float32)
    return CENTRES_KD[truth_N] + 0.5 * noise_ND, truth_N


def test_separate_blobs_are_the_clusters():
    points_ND, truth_N = blobs()
    centroids = two_level_kmeans(points_ND, 32, 4, 25, seed=0)
    distance_KK = np.linalg.norm(CENTRES_KD[:, None] - centroids.coarse_KD, axis=-1)
    assert sorted(distance_KK.argmin(1)) == [0, 1, 2, 3]
    assert distance_KK.min(1).max() < 0.5
    assert (distance_KK.argmin(1)[truth_N] == assign(points_ND, centroids.coarse_KD)).all()
    assert centroids.fine_FD.shape == (32, 3)
    assert (centroids.fine_to_coarse_F == assign(centroids.fine_FD, centroids.coarse_KD)).all()


def test_rows_go_to_the_nearest_centroid():
    generator = np.random.default_rng(1)
    points_ND, coarse_KD = generator.standard_normal((500, 8)), generator.standard_normal((7, 8))
    expected = ((points_ND[:, None] - coarse_KD) ** 2).sum(-1).argmin(1)
    assert (assign(points_ND, coarse_KD) == expected).all()


def repeated_rows() -> np.ndarray:
    """Rows that come thrice, as duplicates do: equally near centroids, which rounding would decide between."""
    generator = np.random.default_rng(0)
    points_ND = generator.standard_normal((9000, 384), dtype=np.float32)
    return points_ND[generator.integers(0, 3000, 9000)]


def blas_threads() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["filepath"].count("numpy.libs")}


@pytest.mark.parametrize("metric", ["euclidean", "spherical"])
def test_equal_bits_whatever_the_threads(metric):
    for points_ND, num_fine in ((blobs()[0], 64), (repeated_rows(), 300)):
        fits = []
        for count in (1, 2, 3, 4, 1):
            with threadpool_limits(count, user_api="blas"):
                fits.append(two_level_kmeans(points_ND, num_fine, 4, 6, 3, metric, max_share=0.3))
                assert blas_threads() == {count}
        assert len({centroids.fine_FD.tobytes() + centroids.coarse_KD.tobytes() for centroids in fits}) == 1
        assert len({centroids.fine_to_coarse_F.tobytes() for centroids in fits}) == 1


WATCHED = """
import sys
from concurrent.futures import ThreadPoolExecutor
from ddm_ray.core import kmeans
from tests.core.test_kmeans import blas_threads, repeated_rows

def watched(*arguments):
    for part in scores(*arguments):
        used.update(blas_threads())
        yield part

used, scores, kmeans._scores, points_ND = set(), kmeans._scores, watched, repeated_rows()
before = blas_threads()
with ThreadPoolExecutor(int(sys.argv[1])) as pool:
    list(pool.map(lambda count: kmeans.two_level_kmeans(points_ND, 300, 4, count, 0), (2, 5, 8)))
print(used, blas_threads() == before)
"""


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_product_is_made_by_one_thread(at_once):
    """Also where several fits run in one process: the number is the library's, and each puts it back in the end."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    command = [sys.executable, "-c", WATCHED, str(at_once)]
    ended = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True, timeout=200)
    assert ended.stdout == "{1} True\n"


def test_a_row_has_its_cluster_whatever_rows_are_beside_it():
    points_ND = repeated_rows()[:3000]
    centroids_KD = np.concatenate([points_ND[:200], points_ND[:200], points_ND[200:300] + 1e-7])
    together_N = assign(points_ND, centroids_KD)
    assert (together_N[:200] < 200).all()  # of two equal ones, the first
    generator = np.random.default_rng(1)
    for _ in range(3):
        order = generator.permutation(3000)
        apart = [assign(part, centroids_KD) for part in np.split(points_ND[order], np.sort(generator.choice(3000, 5)))]
        assert (np.concatenate(apart) == together_N[order]).all()


def test_spherical_clusters_are_directions():
    generator = np.random.default_rng(0)
    direction_N = np.repeat(np.arange(3), 300)
    points_ND = np.eye(3, 8, dtype=np.float32)[direction_N] + 0.05 * generator.standard_normal((900, 8))
    length_N1 = generator.choice([0.1, 1.0, 100.0], (900, 1))
    points_ND = (points_ND * length_N1).astype(np.float32)
    centroids = two_level_kmeans(points_ND, 30, 3, 20, 0, "spherical")
    np.testing.assert_allclose(np.linalg.norm(centroids.fine_FD, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(centroids.coarse_KD, axis=1), 1, rtol=1e-6)
    cluster_N = assign(unit_length(points_ND), centroids.coarse_KD)
    assert len({*zip(cluster_N.tolist(), direction_N.tolist(), strict=True)}) == 3
    # By distance it's the length that tells them apart.
    by_distance_N = assign(points_ND, two_level_kmeans(points_ND, 30, 3, 20, 0).coarse_KD)
    assert len({*zip(by_distance_N.tolist(), direction_N.tolist(), strict=True)}) > 3


def test_rows_without_direction():
    points_ND = blobs()[0].copy()
    points_ND[17] = 0
    with pytest.raises(DataError, match=r"nothing but zeros has no direction; use partition.metric euclidean"):
        two_level_kmeans(points_ND, 8, 4, 5, 0, "spherical")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e19, 1e20, 3e38])
@pytest.mark.parametrize("row", [7, 4999])
def test_rows_without_distances_are_refused(value, row):
    points_ND = np.random.default_rng(0).standard_normal((5000, 8), dtype=np.float32)
    centroids_KD = points_ND[:3].copy()
    points_ND[row, 5] = value
    message = rf"row {row} of the embeddings has no distances: its largest value is .*; leave it out, or check"
    with pytest.raises(DataError, match=message):
        two_level_kmeans(points_ND, 64, 4, 10, 0)
    with pytest.raises(DataError, match=message):
        assign(points_ND, centroids_KD)
    with pytest.raises(DataError, match=r"row 2 of the embeddings has no distances"):
        assign(centroids_KD, np.concatenate([centroids_KD[:2], points_ND[[row]]]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_without_a_finite_direction_are_refused(value):
    points_ND, _ = blobs()
    points_ND[700, 1] = value
    with pytest.raises(DataError, match=r"row 700 of the embeddings has no distances"):
        two_level_kmeans(points_ND, 8, 4, 5, 0, "spherical")


def test_long_rows_are_clustered_as_short_ones_are():
    points_ND, truth_N = blobs()
    for metric, length in (("euclidean", 1e17), ("spherical", 1e30)):
        long_ND = (points_ND * length).astype(np.float32)
        coarse_KD = two_level_kmeans(long_ND, 32, 4, 25, 0, metric).coarse_KD
        if metric == "spherical":
            long_ND = unit_length(long_ND)
        assert len({*zip(assign(long_ND, coarse_KD).tolist(), truth_N.tolist(), strict=True)}) == 4
    points_ND = np.random.default_rng(0).standard_normal((1000, 8), dtype=np.float32)
    points_ND[7] = 1e18
    centroids = two_level_kmeans(points_ND, 64, 4, 10, 0)
    assert (assign(points_ND, centroids.coarse_KD) == assign(points_ND[7:8], centroids.coarse_KD)[0]).sum() == 1


@pytest.mark.parametrize("seed", range(3))
def test_rows_far_from_the_origin_are_told_apart(seed: int):
    """As those of an untrained embedder may be: a hundred thousandth of their length from each other."""
    points_ND = (1 + 4e-6 * np.random.default_rng(seed).standard_normal((89, 16))).astype(np.float32)
    assert len(two_level_kmeans(points_ND, 12, 8, 25, 0).coarse_KD) == 8


def test_a_bound_moves_the_centroids_of_skewed_rows():
    points_ND, truth_N = blobs()
    points_ND = points_ND[(truth_N == 0) | (np.arange(800) % 10 == 0)]
    plain, bounded = (two_level_kmeans(points_ND, 64, 4, 20, 0, max_share=share) for share in (None, 0.3))
    assert plain.coarse_KD.shape == bounded.coarse_KD.shape == (4, 3)
    assert (plain.fine_FD == bounded.fine_FD).all()
    near_blob_0 = [(np.linalg.norm(fit.coarse_KD - CENTRES_KD[0], axis=1) < 4).sum() for fit in (plain, bounded)]
    assert near_blob_0[0] == 1
    assert near_blob_0[1] >= 2


def test_it_is_lloyds_algorithm():
    points_ND, _ = blobs()
    centroids = two_level_kmeans(points_ND, 8, 4, 100, seed=1)
    nearest_N = assign(points_ND, centroids.fine_FD)
    means_FD = np.stack([points_ND[nearest_N == fine].mean(axis=0, dtype=np.float64) for fine in range(8)])
    np.testing.assert_allclose(centroids.fine_FD, means_FD, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("different", [1, 3])
def test_too_few_different_rows(different):
    points_ND = np.eye(different, 3, dtype=np.float32)[np.arange(40) % different]
    with pytest.raises(DataError, match=rf"4 clusters need as many different .*, and {different} were found"):
        two_level_kmeans(points_ND, 16, 4, 10, seed=0)


def test_seeds_matter_and_all_rows_are_used():
    points_ND, _ = blobs()
    fine = [two_level_kmeans(points_ND, 64, 4, 10, seed=seed).fine_FD.tobytes() for seed in (0, 1)]
    assert fine[0] != fine[1]
    # One fine centroid is the mean of all rows only if all were used.
    mean_D = two_level_kmeans(points_ND, 1, 1, 5, seed=0).coarse_KD[0]
    np.testing.assert_allclose(mean_D, points_ND.mean(0), atol=1e-4)


@pytest.mark.parametrize(
    ("num_rows", "asked", "clusters", "used"), [(40, 64, 4, 20), (4, 64, 4, 4), (5, 3, 2, 2), (40, 3, 4, 4)]
)
def test_few_rows_have_fewer_fine_centroids(num_rows, asked, clusters, used, capfd):
    points_ND = np.random.default_rng(2).standard_normal((num_rows, 3), dtype=np.float32)
    centroids = two_level_kmeans(points_ND, asked, clusters, 10, seed=0)
    assert centroids.fine_FD.shape == (used, 3)
    assert centroids.coarse_KD.shape == (clusters, 3)
    assert sorted(set(centroids.fine_to_coarse_F)) == list(range(clusters))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("seed", range(12))
def test_one_row_unlike_all_others_has_its_cluster(seed):
    """Drawn centroids are mostly of equal rows: those left without rows begin again at rows far from their own."""
    generator = np.random.default_rng(seed)
    points_ND = np.array([[0, 0], [4, 0], [0, 4]], np.float32)[generator.integers(0, 3, 300)]
    points_ND[generator.integers(300)] = [9, 9]
    centroids = two_level_kmeans(points_ND, 8, 4, 10, seed)
    assert {*map(tuple, centroids.coarse_KD.tolist())} == {(0, 0), (4, 0), (0, 4), (9, 9)}


def test_at_least_one_iteration():
    with pytest.raises(ConfigError, match=r"0 iterations has no centroids; use partition.iterations of 1 or more"):
        two_level_kmeans(blobs()[0], 8, 4, 0, seed=0)
    assert two_level_kmeans(blobs()[0], 8, 4, 1, seed=0).coarse_KD.shape == (4, 3)


def test_fewer_rows_than_clusters():
    with pytest.raises(DataError, match=r"3 training rows can't fill 4 clusters; use fewer partition.num_clusters"):
        two_level_kmeans(np.zeros((3, 2), np.float32), 4, 4, 10, seed=0)
