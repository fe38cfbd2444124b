import faiss
import numpy as np
import pytest

from ddm_ray.core.kmeans import assign, two_level_kmeans
from ddm_ray.errors import DataError

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


def test_equal_bits_whatever_the_threads():
    points_ND, _ = blobs()
    threads = faiss.omp_get_max_threads()
    try:
        found = []
        for count in (1, 2, 4):
            faiss.omp_set_num_threads(count)
            found.append(two_level_kmeans(points_ND, 64, 4, 10, seed=3))
            assert faiss.omp_get_max_threads() == count
    finally:
        faiss.omp_set_num_threads(threads)
    assert len({centroids.fine_FD.tobytes() + centroids.coarse_KD.tobytes() for centroids in found}) == 1


def test_seeds_matter_and_all_rows_are_used():
    points_ND, _ = blobs()
    fine = [two_level_kmeans(points_ND, 64, 4, 10, seed=seed).fine_FD.tobytes() for seed in (0, 1)]
    assert fine[0] != fine[1]
    # One fine centroid and no more rows than faiss would subsample: it is their mean only if all were used.
    mean_D = two_level_kmeans(points_ND, 1, 1, 5, seed=0).coarse_KD[0]
    np.testing.assert_allclose(mean_D, points_ND.mean(0), atol=1e-4)


@pytest.mark.parametrize(("num_rows", "asked", "clusters", "used"), [(40, 64, 4, 20), (4, 64, 4, 4), (5, 3, 2, 2)])
def test_few_rows_have_fewer_fine_centroids(num_rows, asked, clusters, used, capfd):
    points_ND = np.random.default_rng(2).standard_normal((num_rows, 3), dtype=np.float32)
    centroids = two_level_kmeans(points_ND, asked, clusters, 10, seed=0)
    assert centroids.fine_FD.shape == (used, 3)
    assert centroids.coarse_KD.shape == (clusters, 3)
    assert sorted(set(centroids.fine_to_coarse_F)) == list(range(clusters))
    assert capfd.readouterr() == ("", "")


def test_fewer_rows_than_clusters():
    with pytest.raises(DataError, match=r"3 training rows can't fill 4 clusters; lower partition.num_clusters"):
        two_level_kmeans(np.zeros((3, 2), np.float32), 4, 4, 10, seed=0)
