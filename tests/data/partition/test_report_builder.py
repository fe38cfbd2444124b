"""The numbers of a partition's report, against brute force, and its warnings."""

import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, silhouette_score

from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition import report_builder
from ddm_ray.data.partition.report_builder import SILHOUETTE_ROWS, ReportBuilder
from ddm_ray.data.schema import EMBEDDING, column, embeddings
from ddm_ray.data.sharded.ray_data import from_row, to_row
from tests.data.partition.report_rows import TEXTS, begun, built, counted, distances_of, groups, made_config, training


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
    distance_N = None if kind == "random" else distances_of(table, cluster_N)
    order = np.random.default_rng(seed).permutation(table.num_rows)

    def seen(part: np.ndarray) -> ReportBuilder:
        builder = begun(config, table, cluster_N)
        builder.add(table.take(pa.array(part)), cluster_N[part], None if distance_N is None else distance_N[part])
        return builder

    with pytest.MonkeyPatch.context() as patch:
        if kind == "many rows":  # of which a sample has a few
            patch.setattr(report_builder, "SILHOUETTE_ROWS", 50)
            patch.setattr(report_builder, "MEASURED_ROWS", 70)
        alone = seen(np.arange(table.num_rows)).build()
        parts = [from_row(to_row(seen(part))) for part in np.split(order, sorted(cuts))]
        for place in joins:
            if len(parts) > 1:
                other = parts.pop(place % len(parts))
                parts[place % len(parts)].join(other)
        builder = begun(config, table, cluster_N)
        for part in parts:
            builder.join(from_row(to_row(part)))
        joined = builder.build()
    assert joined == alone


def test_numbers_are_those_of_brute_force() -> None:
    """The silhouette is of the training rows of lowest keys, and that of few rows is None."""
    config = made_config()
    table, cluster_N = groups(config, [2000, 1500, 1500, 1500], spread=1.0)
    train = np.flatnonzero(training(table))
    label_N, key_N = table["label"].to_numpy(), shuffle_keys(table["id"].to_pylist())
    assert counted(config, table, cluster_N).ari == pytest.approx(adjusted_rand_score(label_N[train], cluster_N[train]))
    chosen = train[np.argsort(key_N[train])][:SILHOUETTE_ROWS]
    assert len(train) > SILHOUETTE_ROWS
    expected = silhouette_score(embeddings(table)[chosen], cluster_N[chosen])
    assert built(config, table, cluster_N).info.silhouette == pytest.approx(expected, abs=1e-6)
    single = made_config(num_clusters=1, method="random")
    few = begun(single, table.slice(0, 1), np.zeros(1, np.int64))
    few.add(table.slice(0, 1), np.zeros(1, np.int64), None)
    assert few.build().info.silhouette is None and few.build().info.far_K == ()


def test_spherical_clusters_are_measured_by_direction() -> None:
    config = made_config(metric="spherical")
    table, cluster_N = groups(config, [100, 100, 100, 100], spread=0.1)
    rows_ND = embeddings(table) * np.random.default_rng(0).uniform(0.1, 10, (400, 1))
    longer = table.set_column(table.schema.get_field_index("embedding"), "embedding", column(rows_ND, EMBEDDING))
    as_it_is, scaled = (built(config, rows, cluster_N).info.silhouette for rows in (table, longer))
    assert scaled == pytest.approx(as_it_is, abs=1e-5)
    euclidean = built(made_config(), longer, cluster_N).info.silhouette
    assert euclidean < as_it_is - 0.2


@pytest.mark.parametrize(
    ("sizes", "method", "warned"),
    [
        ([100], "embeddings", []),
        ([89, 11], "embeddings", []),
        ([50, 25, 29], "embeddings", []),
        ([140, 700, *[190] * 6], "embeddings", ["cluster 1 has 35% of the training rows, .* is 12%: .*max_share"]),
        ([95, 9], "random", ["cluster 0 has 92% .* of steps$", "fewer than 8 training rows, .*again: 1$"]),
        ([300, 300, 8, 4], "embeddings", ["fewer than 12 training rows, .*again: 2, 3; try .*num_clusters$"]),
    ],
)
def test_clusters_of_very_many_and_of_very_few_rows_are_warned_of(
    sizes: list[int], method: str, warned: list[str]
) -> None:
    config = made_config(num_clusters=len(sizes), method=method)
    report = built(config, *groups(config, sizes))
    assert len(report.info.warnings) == len(warned)
    for line, pattern in zip(report.info.warnings, warned, strict=True):
        assert re.search(pattern, line), line
        assert f"Warning: {line}." in report.html.decode()


def test_rows_are_far_beyond_99_of_100_earlier_ones() -> None:
    config = made_config()
    table, cluster_N = groups(config, [100, 200, 300, 5])
    report, train_N = built(config, table, cluster_N), training(table)
    distance_N = distances_of(table, cluster_N).astype(np.float32)
    limits = [np.percentile(distance_N[train_N & (cluster_N == cluster)], 99) for cluster in range(4)]
    assert report.info.far_K == pytest.approx(limits)
    assert report.info.fit == ()
    later = ReportBuilder(config, counted(config, table, cluster_N), int(train_N.sum()), (*limits[:2], 0.0, None))
    halves = np.arange(table.num_rows) % 2 == 0
    for half in (halves, ~halves):
        part = ReportBuilder(config, counted(config, table, cluster_N), int(train_N.sum()), later._far_K)
        part.add(table.filter(pa.array(half)), cluster_N[half], distance_N[half])
        later.join(part)
    info = later.build().info
    rows_K = np.bincount(cluster_N[train_N], minlength=4).tolist()
    assert [each.rows for each in info.fit] == rows_K
    assert [each.far for each in info.fit] == [1, 2, rows_K[2], None]
    assert info.far_K == later._far_K
    assert "in cluster 2: these pictures are unlike" in info.warnings[0]
