"""The partition's report: its numbers against brute force, its warnings, its page and pictures."""

import base64
import io
import os
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score, silhouette_samples, silhouette_score

from ddm_ray.config import RunConfig
from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition import report_builder
from ddm_ray.data.partition.pictures import GAP, TILE, principal_axes
from ddm_ray.data.partition.report_builder import (
    IMAGES,
    PROJECTED_ROWS,
    SILHOUETTE_ROWS,
    Report,
    ReportBuilder,
    given_report,
)
from ddm_ray.data.partition.stage import partition_info
from ddm_ray.data.schema import EMBEDDING, column, embeddings
from ddm_ray.data.sharded.ray_data import from_row, to_row
from ddm_ray.storage.info import PartitionInfo, ShardInfo
from tests.data.partition.report_rows import TEXTS, centroids_of, distances_of, groups, made_config, training


def info_of(rows: list[tuple[int, int, list[int]]]) -> PartitionInfo:
    """What a partition's manifest says of shards of so many training and held-out rows, and counts by class."""
    fields = {"data_std": None, "centroids": None}
    shards = [
        ShardInfo(cluster=k, rows=train + held, rows_train=train, rows_heldout=held, counts_C=counts_C, **fields)
        for k, (train, held, counts_C) in enumerate(rows)
    ]
    return partition_info(shards, None)


def counted(config: RunConfig, table: pa.Table, cluster_N: np.ndarray) -> PartitionInfo:
    train_N, num_classes = training(table), len(config.data.class_names)
    rows = []
    for cluster in range(config.partition.num_clusters):
        mine_N = cluster_N == cluster
        label_N = table["label"].to_numpy()[train_N & mine_N] if num_classes else np.zeros(0, int)
        counts_C = np.bincount(label_N, minlength=num_classes).tolist()
        rows.append(((train_N & mine_N).sum(), (~train_N & mine_N).sum(), counts_C))
    return info_of(rows)


def begun(config: RunConfig, table: pa.Table, cluster_N: np.ndarray) -> ReportBuilder:
    """The builder of these rows' report, before it sees any."""
    info = counted(config, table, cluster_N)
    return ReportBuilder(config, info, sum(info.rows_K))


def built(config: RunConfig, table: pa.Table, cluster_N: np.ndarray, order: np.ndarray | None = None) -> Report:
    """The report of the rows in this order, seen in parts of uneven sizes."""
    centroids = centroids_of(table, cluster_N)
    distance_N = distances_of(table, cluster_N, centroids)
    builder = begun(config, table, cluster_N)
    order = np.arange(table.num_rows) if order is None else order
    for part in np.split(order, [1, 40, 41, 333]):
        builder.add(table.take(pa.array(part)), cluster_N[part], distance_N[part])
    return builder.build(centroids, {"rejected": "12 <b>"})


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
    assert joined.info == alone.info
    assert joined.files == alone.files


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
    assert (f"Warning: {expected}" in report.files["report.html"].decode()) is loud


def of_clusters(report: Report) -> list[str]:
    """The warnings but for that of empty classes, which groups leave of recipe tiny's."""
    return [line for line in report.info.warnings if "classes have no training row" not in line]


def test_classes_without_rows_are_warned_of() -> None:
    config = made_config(method="given")
    assert "2 of 10 classes have no training row: 0, 9" in given_warnings(config, [(80, 9, [0, *[10] * 8, 0])] * 4)
    assert given_warnings(config, [(100, 9, [10] * 10)] * 4) == []


def given_warnings(config: RunConfig, rows: list[tuple[int, int, list[int]]]) -> list[str]:
    return list(given_report(config, info_of(rows)).info.warnings)


@pytest.mark.parametrize(("rows_K", "warned"), [([100], []), ([89, 11], []), ([95, 9], [0]), ([50, 25, 29], [])])
def test_an_equal_share_of_few_clusters_is_no_catch_all(rows_K: list[int], warned: list[int]) -> None:
    config = made_config(len(rows_K), batch=2, method="given")
    report = given_report(config, info_of([(rows, 0, [rows] + [0] * 9) for rows in rows_K]))
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


class _Page(HTMLParser):
    """What a page shows: its pictures, its text, what it would fetch; every tag must be closed."""

    def __init__(self, text: str):
        super().__init__()
        self.images: list[bytes] = []
        self.words: list[str] = []
        self.fetched: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):
            self._open.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                kind, _, data = (value or "").partition(",")
                if kind == "data:image/png;base64":
                    self.images.append(base64.b64decode(data))
                else:
                    self.fetched.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_holds_its_pictures_and_fetches_nothing() -> None:
    config = made_config()
    table, cluster_N = groups(config, [100, 100, 100, 100])
    files = built(config, table, cluster_N).files
    assert set(files) == {"report.html", "clusters.png", "projection.png", "fine.png", "distances.json"}
    page = _Page(files["report.html"].decode())
    assert page.images == [files[name] for name in ("clusters.png", "projection.png", "fine.png")]
    assert page.fetched == []
    assert {"tiny: 4 clusters", "12 <b>", "euclidean", "digits"} <= set(page.words)
    sizes = {name: Image.open(io.BytesIO(files[name])).size for name in files if name.endswith(".png")}
    assert sizes["projection.png"] == (900, 650)
    assert sizes["clusters.png"][1] > 4 * TILE
    assert sizes["clusters.png"][0] > 2 * IMAGES * TILE


def test_bytes_depend_on_the_set_of_rows_alone() -> None:
    config = made_config()
    table, cluster_N = groups(config, [1000, 4000, 1000, 1000], spread=1.0)
    mixed = np.random.default_rng(1).permutation(table.num_rows)
    assert built(config, table, cluster_N) == built(config, table, cluster_N, mixed)


def test_images_are_the_nearest_and_those_of_lowest_keys() -> None:
    config = made_config()
    table, cluster_N = groups(config, [80, 40, 60, 5])
    picture = Image.open(io.BytesIO(built(config, table, cluster_N).files["clusters.png"])).convert("L")
    distance_N = distances_of(table, cluster_N, centroids_of(table, cluster_N))
    shuffle_N = shuffle_keys(table["id"].to_pylist())
    step = TILE + GAP
    left = picture.width - 2 * (IMAGES * step + 20)
    for cluster in range(4):
        mine = np.flatnonzero(training(table) & (cluster_N == cluster))
        shown = [mine[np.argsort(key_N[mine])][:IMAGES] for key_N in (distance_N, shuffle_N)]
        y = picture.height - 10 - (4 - cluster) * step + TILE // 2
        for group, rows in enumerate(shown):
            begin = left + group * (IMAGES * step + 20)
            shades = [picture.getpixel((begin + place * step + TILE // 2, y)) for place in range(IMAGES)]
            assert shades == [int(row) % 251 for row in rows] + [255] * (IMAGES - len(rows))


def test_latents_are_shown_by_thumbnails_and_texts_by_captions() -> None:
    config = made_config(data=TEXTS)
    table, cluster_N = groups(config, [30, 30, 30, 30])
    report = built(config, table, cluster_N)
    picture = Image.open(io.BytesIO(report.files["clusters.png"])).convert("L")
    key_N = shuffle_keys(table["id"].to_pylist())
    words = _Page(report.files["report.html"].decode()).words
    for cluster in range(4):
        mine = np.flatnonzero(training(table) & (cluster_N == cluster))
        rows = mine[np.argsort(key_N[mine])]
        x = picture.width - (IMAGES * (TILE + GAP) + 20) + TILE // 2
        y = picture.height - 10 - (4 - cluster) * (TILE + GAP) + TILE // 2
        assert picture.getpixel((x, y)) == pytest.approx(rows[0], abs=3)
        assert "; ".join(f"<number> {row}" for row in rows[:3]) in words


def test_without_centroids_there_are_clusters_to_see_all_the_same() -> None:
    config = made_config(method="random")
    table, cluster_N = groups(config, [50, 50, 50, 50])
    builder = begun(config, table, cluster_N)
    builder.add(table, cluster_N, None)
    report = builder.build(None, {})
    assert set(report.files) == {"report.html", "clusters.png", "projection.png"}
    single = made_config(num_clusters=1, method="random")
    few = begun(single, table.slice(0, 1), np.zeros(1, np.int64))
    few.add(table.slice(0, 1), np.zeros(1, np.int64), None)
    assert few.build(None, {}).info.silhouette is None


def test_the_report_of_given_shards_needs_no_rows() -> None:
    config = made_config(num_clusters=2, method="given")
    info = info_of([(60, 3, [10, 50, *[0] * 8]), (40, 5, [0, 0, *[5] * 8])])
    report = given_report(config, info)
    assert set(report.files) == {"report.html"}
    assert (info.rows_K, info.rows_heldout_K, info.imbalance) == ((60, 40), (3, 5), 1.5)
    label_N = np.repeat([0, 1, *range(2, 10)], [10, 50, *[5] * 8])
    assert info.ari == pytest.approx(adjusted_rand_score(label_N, np.repeat([0, 1], [60, 40])))
    assert "1 (83%), 0 (17%)" in _Page(report.files["report.html"].decode()).words


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
