"""The partition's report: its numbers against brute force, its warnings, its page and pictures."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score, silhouette_samples, silhouette_score

from ddm_ray.config import RunConfig
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition import report_builder
from ddm_ray.data.partition.pictures import principal_axes
from ddm_ray.data.partition.report_builder import (
    PROJECTED_ROWS,
    SILHOUETTE_ROWS,
    Report,
    ReportBuilder,
)
from ddm_ray.data.schema import EMBEDDING, column, embeddings
from ddm_ray.data.sharded.ray_data import from_row, to_row
from tests.data.partition.report_rows import (
    TEXTS,
    begun,
    built,
    centroids_of,
    counted,
    distances_of,
    groups,
    info_of,
    made_config,
    training,
    without_rows,
)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    cuts=st.lists(st.integers(0, 600), max_size=5),
    joins=st.lists(st.integers(0, 4), max_size=5),
    kind=st.sampled_from(["pixels", "texts", "many rows", "random"]),
)
def test_a_report_is_the_same_however_its_rows_are_shared_out(
    seed: int, cuts: list[int], joins: list[int], kind: str
) -> None:
    """Builders of some rows each, sent from one process to another, and joined in any order and any pairs."""
    config = made_config(data=TEXTS if kind == "texts" else None, method="random" if kind == "random" else "embeddings")
    table, cluster_N = groups(config, [250, 150, 120, 80])
    centroids = None if kind == "random" else centroids_of(table, cluster_N)
    distance_N = None if centroids is None else distances_of(table, cluster_N, centroids)
    order = np.random.default_rng(seed).permutation(table.num_rows)

    def seen(part: np.ndarray) -> ReportBuilder:
        builder = begun(config, table, cluster_N)
        builder.add(table.take(pa.array(part)), cluster_N[part], None if distance_N is None else distance_N[part])
        return builder

    with pytest.MonkeyPatch.context() as patch:
        if kind == "many rows":  # of which a sample has a few
            patch.setattr(report_builder, "PROJECTED_ROWS", 60)
            patch.setattr(report_builder, "SILHOUETTE_ROWS", 50)
            patch.setattr(report_builder, "MEASURED_ROWS", 70)
        alone = seen(np.arange(table.num_rows)).build(centroids, {})
        parts = [from_row(to_row(seen(part))) for part in np.split(order, sorted(cuts))]
        for place in joins:
            if len(parts) > 1:
                other = parts.pop(place % len(parts))
                parts[place % len(parts)].join(other)
        builder = begun(config, table, cluster_N)
        for part in parts:
            builder.join(from_row(to_row(part)))
        joined = builder.build(centroids, {})
    assert joined == alone


def test_numbers_are_those_of_brute_force() -> None:
    config = made_config()
    table, cluster_N = groups(config, [300, 100, 150, 50])
    info = counted(config, table, cluster_N)
    train_N = training(table)
    label_N = table["label"].to_numpy()
    rows_K = np.bincount(cluster_N[train_N])
    assert info.imbalance == pytest.approx(rows_K.max() / rows_K.min())
    share_K = rows_K / rows_K.sum()
    assert info.entropy == pytest.approx(-sum(share * np.log(share) for share in share_K) / np.log(4))
    assert info.ari == pytest.approx(adjusted_rand_score(label_N[train_N], cluster_N[train_N]))
    report = built(config, table, cluster_N).info
    rows_ND = embeddings(table)[train_N]
    assert report.silhouette == pytest.approx(silhouette_score(rows_ND, cluster_N[train_N]), abs=1e-6)
    values_N = silhouette_samples(rows_ND, cluster_N[train_N])
    means = [values_N[cluster_N[train_N] == cluster].mean() for cluster in range(4)]
    assert report.silhouette_K == pytest.approx(means, abs=1e-6)


def test_the_silhouette_is_that_of_the_rows_of_lowest_keys() -> None:
    config = made_config()
    table, cluster_N = groups(config, [2000, 1500, 1500, 1500], spread=1.0)
    report = built(config, table, cluster_N)
    train = np.flatnonzero(training(table))
    assert len(train) > PROJECTED_ROWS > SILHOUETTE_ROWS
    key_N = shuffle_keys(table["id"].to_pylist())
    chosen = train[np.argsort(key_N[train])][:SILHOUETTE_ROWS]
    expected = silhouette_score(embeddings(table)[chosen], cluster_N[chosen])
    assert report.info.silhouette == pytest.approx(expected, abs=1e-6)


def test_spherical_clusters_are_measured_by_direction() -> None:
    config = made_config(metric="spherical")
    table, cluster_N = groups(config, [100, 100, 100, 100], spread=0.1)
    rows_ND = embeddings(table) * np.random.default_rng(0).uniform(0.1, 10, (400, 1))
    longer = table.set_column(table.schema.get_field_index("embedding"), "embedding", column(rows_ND, EMBEDDING))
    as_it_is, scaled = (built(config, rows, cluster_N).info.silhouette for rows in (table, longer))
    assert scaled == pytest.approx(as_it_is, abs=1e-5)
    euclidean = built(made_config(), longer, cluster_N).info.silhouette
    assert euclidean < as_it_is - 0.2


@pytest.mark.parametrize(("share", "loud"), [(0.41, True), (0.14, False)])
def test_a_catch_all_cluster_is_warned_of(share: float, loud: bool) -> None:
    config = made_config(num_clusters=8)
    large = round(2000 * share)
    table, cluster_N = groups(config, [*[(2000 - large) // 7] * 3, large, *[(2000 - large) // 7] * 4])
    report = built(config, table, cluster_N)
    rows_K = counted(config, table, cluster_N).rows_K
    exact = rows_K[3] / sum(rows_K)
    assert exact == pytest.approx(share, abs=0.02)
    expected = f"cluster 3 has {exact:.0%} of the training rows, where an equal share is 12%"
    assert [line.startswith(expected) and "max_share" in line for line in report.info.warnings] == [True] * loud
    assert (f"Warning: {expected}" in report.html.decode()) is loud


def of_clusters(report: Report) -> list[str]:
    """The warnings but for that of empty classes, which groups leave of recipe tiny's."""
    return [line for line in report.info.warnings if "classes have no training row" not in line]


def test_classes_without_rows_are_warned_of() -> None:
    config = made_config(method="given")
    assert "2 of 10 classes have no training row: 0, 9" in given_warnings(config, [(80, 9, [0, *[10] * 8, 0])] * 4)
    assert given_warnings(config, [(100, 9, [10] * 10)] * 4) == []


def given_warnings(config: RunConfig, rows: list[tuple[int, int, list[int]]]) -> list[str]:
    return list(without_rows(config, info_of(rows)).info.warnings)


@pytest.mark.parametrize(("rows_K", "warned"), [([100], []), ([89, 11], []), ([95, 9], [0]), ([50, 25, 29], [])])
def test_an_equal_share_of_few_clusters_is_no_catch_all(rows_K: list[int], warned: list[int]) -> None:
    config = made_config(len(rows_K), batch=2, method="given")
    report = without_rows(config, info_of([(rows, 0, [rows] + [0] * 9) for rows in rows_K]))
    assert [int(line.split()[1]) for line in of_clusters(report)] == warned


def test_tiny_clusters_are_warned_of() -> None:
    config = made_config(num_clusters=4, batch=64)
    table, cluster_N = groups(config, [300, 70, 60, 300])
    (line,) = of_clusters(built(config, table, cluster_N))
    assert line.startswith("clusters 1, 2 have fewer training rows than a batch of an expert, 64;")
    assert of_clusters(built(made_config(num_clusters=4, batch=8), table, cluster_N)) == []
    large = [(rows, 0, []) for rows in (10_000, 10_000, 10_000, 700)]
    (line,) = given_warnings(made_config(num_clusters=4, batch=64, method="given"), large)
    assert line == "cluster 3 has fewer training rows than a tenth of an equal share, 767"


def test_clusters_without_borders_are_warned_of() -> None:
    config = made_config()
    table, cluster_N = groups(config, [100, 100, 100, 100])
    at_random_N = np.random.default_rng(0).permutation(cluster_N)
    (line,) = of_clusters(built(config, table, at_random_N))
    assert line.startswith("the silhouette is -0.0")
    assert of_clusters(built(made_config(method="random"), table, at_random_N)) == []
    assert of_clusters(built(config, table, cluster_N)) == []


def test_bytes_depend_on_the_set_of_rows_alone() -> None:
    config = made_config()
    table, cluster_N = groups(config, [1000, 4000, 1000, 1000], spread=1.0)
    mixed = np.random.default_rng(1).permutation(table.num_rows)
    assert built(config, table, cluster_N) == built(config, table, cluster_N, mixed)


def test_rows_are_far_beyond_99_of_100_earlier_ones() -> None:
    config = made_config()
    table, cluster_N = groups(config, [100, 200, 300, 5])
    report, train_N = built(config, table, cluster_N), training(table)
    distance_N = distances_of(table, cluster_N, centroids_of(table, cluster_N)).astype(np.float32)
    limits = [np.percentile(distance_N[train_N & (cluster_N == cluster)], 99) for cluster in range(4)]
    assert report.info.far_K == pytest.approx(limits)
    assert report.info.fit == ()
    later = ReportBuilder(config, counted(config, table, cluster_N), int(train_N.sum()), (*limits[:2], 0.0, None))
    halves = np.arange(table.num_rows) % 2 == 0
    for half in (halves, ~halves):
        part = ReportBuilder(config, counted(config, table, cluster_N), int(train_N.sum()), later._far_K)
        part.add(table.filter(pa.array(half)), cluster_N[half], distance_N[half])
        later.join(part)
    info = later.build(None, {}).info
    rows_K = np.bincount(cluster_N[train_N], minlength=4).tolist()
    assert [each.rows for each in info.fit] == rows_K
    assert [each.far for each in info.fit] == [1, 2, rows_K[2], None]
    assert info.far_K == later._far_K
    assert "in cluster 2: these pictures are unlike" in info.warnings[0]


def test_the_projection_is_on_the_principal_components() -> None:
    rows_ND = np.random.default_rng(0).normal(size=(500, 5)) @ np.random.default_rng(1).normal(size=(5, 5))
    mean_D, axes_D2 = principal_axes(rows_ND)
    expected = PCA(2).fit(rows_ND)
    np.testing.assert_allclose(mean_D, expected.mean_)
    np.testing.assert_allclose(np.abs(expected.components_ @ axes_D2), np.eye(2), atol=1e-8)
    assert principal_axes(rows_ND[:, :1])[1].tolist() == [[1.0, 0.0]]


def test_memory_doesnt_grow_with_the_rows() -> None:
    config = made_config(data={"image_size": 16, "channels": 3})
    table, cluster_N = groups(config, [500, 500, 500, 500])
    centroids = centroids_of(table, cluster_N)
    distance_N = distances_of(table, cluster_N, centroids)
    builder = ReportBuilder(config, counted(config, table, cluster_N), 110 * table.num_rows)

    def feed(first: int, last: int) -> int:
        for part in range(first, last):
            ids = pa.array([f"{part}/{number}" for number in range(table.num_rows)])
            builder.add(table.set_column(0, "id", ids), cluster_N, distance_N)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = feed(0, 10)
    after = feed(10, 110)
    fed = 100 * table.nbytes
    assert fed > 150 * 2**20
    assert after - before < 16 * 2**20
