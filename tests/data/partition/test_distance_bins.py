"""Distances that are counted in bins, beside numpy's of all rows, and what is refused of a file of them."""

import json

import numpy as np
import pytest

from ddm_ray.data.partition.distances import CLUSTER_BYTES, LEAST, MOST, PRECISION, Distances
from ddm_ray.errors import CorruptArtifact

PERCENTS = (0, 50, 90, 99, 99.9, 100)


def counted(cluster_N: np.ndarray, distance_N: np.ndarray, num_clusters: int, parts: int = 7) -> Distances:
    distances = Distances(num_clusters)
    for cluster_M, distance_M in zip(np.array_split(cluster_N, parts), np.array_split(distance_N, parts), strict=True):
        distances.add(cluster_M, distance_M)
    return distances


def draws(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Clusters 0 to 4 and distances of 4000 rows: each of another scale and form; of cluster 3 one, of 4 none."""
    generator = np.random.default_rng(seed)
    cluster_N = np.append(generator.integers(0, 3, 3999), 3)
    form_N = np.stack(
        [
            np.linalg.norm(generator.normal(size=(4000, 16)), axis=1),
            generator.lognormal(-9, 2, 4000),
            np.round(generator.gamma(2, 800, 4000)),
        ]
    )
    return cluster_N, form_N[cluster_N % 3, np.arange(4000)].astype(np.float32)


@pytest.mark.parametrize("seed", range(5))
def test_means_and_percentiles_are_numpys_within_the_precision(seed: int) -> None:
    cluster_N, distance_N = draws(seed)
    distances = counted(cluster_N, distance_N, 5)
    distances = Distances.from_bytes(distances.to_bytes(), 5, "here")
    assert distances.measured == 4000 and distances.rows_K.tolist() == np.bincount(cluster_N, minlength=5).tolist()
    for cluster in range(4):
        own_N = distance_N[cluster_N == cluster].astype(np.float64)
        assert distances.means()[cluster] == pytest.approx(own_N.mean(), rel=PRECISION / 2)
        for percent in PERCENTS:
            exact = np.percentile(own_N, percent)
            assert exact * (1 - 1e-9) <= distances.percentiles(percent)[cluster] <= exact * (1 + PRECISION)
        assert distances.percentiles(100)[cluster] == own_N.max()
    assert distances.means()[4] is None and distances.percentiles(99)[4] is None


@pytest.mark.parametrize("deviation", [0.2, 0.05, 0.01])
def test_of_rows_alike_one_in_a_hundred_is_far(deviation: float) -> None:
    """However near together distances are: a bin may have many of them."""
    random = np.random.default_rng(0)
    rows = 10**5
    old_N, new_N = (random.normal(1.4, deviation * 1.4, rows).clip(0.01).astype(np.float32) for _ in range(2))
    old, new = (counted(np.zeros(rows, np.int64), each_N, 1) for each_N in (old_N, new_N))
    [far] = old.farther(new, 99)
    assert far == pytest.approx(rows / 100, rel=0.1)
    assert old.farther(old, 99) == [rows // 100], "of the same ones"
    [none] = counted(np.zeros(0, np.int64), np.zeros(0), 1, parts=1).farther(new, 99)
    assert none is None


def test_of_equal_rows_as_many_are_far() -> None:
    one, other = (counted(np.zeros(n, np.int64), np.full(n, 3.7), 1, parts=1) for n in (200, 1000))
    assert one.farther(other, 99) == [10]
    farther = counted(np.zeros(30, np.int64), np.full(30, 3.9), 1, parts=1)
    assert one.farther(farther, 99) == [30] and farther.farther(one, 99) == [0]


def test_few_rows_and_equal_ones_are_exact_above() -> None:
    for values in ([0.0], [0.0] * 50, [3.7] * 200, [LEAST / 4] * 3, [0.1, 8.0]):
        distance_N = np.array(values, np.float32)
        distances = counted(np.zeros(len(values), np.int64), distance_N, 1, parts=1)
        [far] = distances.percentiles(99)
        assert np.percentile(distance_N, 99) <= far + 1e-12 and far <= distance_N.max()
        assert not (distance_N > far).any() or len(set(values)) > 1
    [far] = counted(np.zeros(2, np.int64), np.array([1.0, np.inf]), 1, parts=1).percentiles(100)
    assert far == MOST


def test_the_bytes_are_those_of_the_set_of_rows() -> None:
    cluster_N, distance_N = draws(0)
    order = np.random.default_rng(1).permutation(len(cluster_N))
    at_once = counted(cluster_N, distance_N, 5, parts=1)
    assert counted(cluster_N[order], distance_N[order], 5).to_bytes() == at_once.to_bytes()
    halves = [counted(cluster_N[half], distance_N[half], 5) for half in (slice(0, 1500), slice(1500, None))]
    assert halves[0].joined(halves[1]).to_bytes() == at_once.to_bytes() == halves[1].joined(halves[0]).to_bytes()
    assert halves[0].rows_K.sum() == 1500


def test_a_sample_stands_for_all_rows() -> None:
    cluster_N, distance_N = draws(0)
    rows_K = np.bincount(cluster_N, minlength=5)
    sample = counted(cluster_N[::4], distance_N[::4], 5)
    before = sample.percentiles(90)
    assert sample.rows_K[:3].sum() == 1000 and sample.rows_K[3:].tolist() == [0, 0]
    sample.stand_for([*rows_K[:4], 17])
    assert sample.measured == 1000 and sample.rows_K.tolist() == [*rows_K[:3], 0, 0]
    assert sample.percentiles(90)[:3] == pytest.approx(before[:3], rel=0.05)
    few = counted(np.zeros(3, np.int64), np.array([1.0, 2.0, 4.0]), 1, parts=1)
    few.stand_for([5])
    assert few.rows_K.tolist() == [5] and few.percentiles(100) == [4.0]


def test_a_cluster_of_all_distances_fits_its_bytes() -> None:
    distance_N = np.geomspace(LEAST / 2, MOST * 2, 10**6).astype(np.float32)
    distances = counted(np.zeros(10**6, np.int64), distance_N, 1, parts=3)
    distances.stand_for([10**15])
    assert len(distances.to_bytes()) < CLUSTER_BYTES
    assert Distances.from_bytes(distances.to_bytes(), 1, "here").to_bytes() == distances.to_bytes()


GOOD = {"most": 2.0, "bins": [4000, 4001], "rows": [1, 2]}


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"most": -1.0}, "clusters.0.most"),
        ({"most": None}, "clusters.0.most"),
        ({"most": 1e300}, "clusters.0.most"),
        ({"bins": [4001, 4000]}, "aren't counts"),
        ({"bins": [4000]}, "aren't counts"),
        ({"bins": [4000, 8193]}, "clusters.0.bins.1"),
        ({"bins": [-1, 4000]}, "clusters.0.bins.0"),
        ({"bins": "x"}, "clusters.0.bins"),
        ({"rows": [0, 1]}, "clusters.0.rows.0"),
        ({"rows": [1, True]}, "clusters.0.rows.1"),
        ({"rows": [1, 2**53]}, "aren't counts"),
        ({"rows": [1, 10**400]}, "aren't counts"),
    ],
)
def test_what_others_wrote_is_refused_by_its_field(cluster: dict[str, object], words: str) -> None:
    data = json.dumps({"measured": 3, "clusters": [{**GOOD, **cluster}]}).encode()
    with pytest.raises(CorruptArtifact) as caught:
        Distances.from_bytes(data, 1, "run/distances.json")
    assert words in str(caught.value) and str(caught.value).startswith("run/distances.json: not a record of distances")


@pytest.mark.parametrize("data", [b"", b"[1]", b"\xff\xfe", b"{}", b'{"a":' * 10_000, b'{"measured": 1}'])
def test_bytes_that_are_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptArtifact, match=r"^here: not a record of distances"):
        Distances.from_bytes(data, 1, "here")


def test_distances_of_other_clusters_are_refused() -> None:
    data = json.dumps({"measured": 3, "clusters": [GOOD]}).encode()
    assert Distances.from_bytes(data, 1, "here").rows_K.tolist() == [3]
    with pytest.raises(CorruptArtifact, match="here: is of 1 clusters, its run has 2"):
        Distances.from_bytes(data, 2, "here")
