"""The partition's report: its numbers against brute force, its warnings, its page and pictures."""

import base64
import io
import os
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score, silhouette_samples, silhouette_score

from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.core.kmeans import Centroids
from ddm_ray.data.order import ranks
from ddm_ray.data.partition_pictures import GAP, TILE, principal_axes
from ddm_ray.data.partition_report import IMAGES, PROJECTED_ROWS, SILHOUETTE_ROWS, Report, Survey, given_report
from ddm_ray.data.schema import EMBEDDING, HELDOUT, TRAIN, column, embeddings, rows_schema

DIM = 6
TEXTS = {
    "class_names": (),
    "num_classes": None,
    "channels": 4,
    "text": {"encoder": "any", "tokens": 2, "dim": 3},
    "latents": {"autoencoder": "any", "scale": 1.0},
}


def made_config(num_clusters: int = 4, batch: int = 8, data: dict | None = None, **partition: object) -> RunConfig:
    fields = load_recipe("tiny").model_dump(mode="json")
    fields["partition"] |= {"num_clusters": num_clusters, **partition}
    fields["expert"]["train"]["global_batch"] = batch * num_clusters
    fields["data"] |= data or {}
    return RunConfig.model_validate(fields)


def groups(config: RunConfig, sizes: list[int], spread: float = 0.3, seed: int = 0) -> tuple[pa.Table, np.ndarray]:
    """Rows around as many points as there are sizes, a fifth of them held out; and each row's group.

    The shade of an image tells its row's number. A label is that of the group for two rows of three.
    """
    rng = np.random.default_rng(seed)
    group_N = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    num_rows = len(group_N)
    points_KD = np.random.default_rng(99).normal(size=(len(sizes), DIM))
    data = config.data
    shade_N = np.arange(num_rows) % 251
    columns = {
        "id": [f"row/{number:06d}" for number in range(num_rows)],
        "content_hash": [""] * num_rows,
        "split": [HELDOUT if number % 5 == 2 else TRAIN for number in range(num_rows)],
        "embedding": column(points_KD[group_N] + rng.normal(size=(num_rows, DIM)) * spread, EMBEDDING),
    }
    if data.text is None:
        columns["data"] = column(np.broadcast_to(shade_N[:, None, None, None], (num_rows, *data.shape)), np.dtype("u1"))
        columns["label"] = np.where(np.arange(num_rows) % 3 == 0, np.arange(num_rows) % 10, group_N % 10)
    else:
        columns["data"] = column(np.zeros((num_rows, *data.shape)), np.dtype("<f2"))
        columns["text_tokens"] = [b""] * num_rows
        columns["text"] = [f"<number> {number}" for number in range(num_rows)]
        columns["thumbnail"] = [_jpeg(int(shade)) for shade in shade_N]
    return pa.table(columns, schema=rows_schema(data, DIM)), group_N


def _jpeg(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (shade, shade, shade)).save(buffer, "JPEG")
    return buffer.getvalue()


def centroids_of(table: pa.Table, cluster_N: np.ndarray) -> Centroids:
    rows_ND = embeddings(table)
    coarse_KD = np.stack([rows_ND[cluster_N == cluster].mean(axis=0) for cluster in range(cluster_N.max() + 1)])
    first = [np.flatnonzero(cluster_N == cluster)[:3] for cluster in range(len(coarse_KD))]
    fine = np.concatenate(first)
    return Centroids(rows_ND[fine], coarse_KD, cluster_N[fine])


def distances_of(table: pa.Table, cluster_N: np.ndarray, centroids: Centroids) -> np.ndarray:
    return np.linalg.norm(embeddings(table) - centroids.coarse_KD[cluster_N], axis=1)


def surveyed(config: RunConfig, table: pa.Table, cluster_N: np.ndarray, order: np.ndarray | None = None) -> Report:
    """The report of the rows in this order, seen in parts of uneven sizes."""
    centroids = centroids_of(table, cluster_N)
    distance_N = distances_of(table, cluster_N, centroids)
    survey = Survey(config, config.partition.num_clusters)
    order = np.arange(table.num_rows) if order is None else order
    for part in np.split(order, [1, 40, 41, 333]):
        survey.add(table.take(pa.array(part)), cluster_N[part], distance_N[part])
    return survey.report(centroids, {"rejected": "12 <b>"})


def training(table: pa.Table) -> np.ndarray:
    return np.array(table["split"].to_pylist()) == TRAIN


def test_numbers_are_those_of_brute_force() -> None:
    config = made_config()
    table, cluster_N = groups(config, [300, 100, 150, 50])
    found = surveyed(config, table, cluster_N).info
    train_N = training(table)
    label_N = table["label"].to_numpy()
    rows_K = np.bincount(cluster_N[train_N])
    assert found["rows_K"] == rows_K.tolist()
    assert found["rows_heldout_K"] == np.bincount(cluster_N[~train_N]).tolist()
    counts_CK = [[(train_N & (label_N == c) & (cluster_N == k)).sum() for k in range(4)] for c in range(10)]
    assert found["counts_CK"] == np.array(counts_CK).tolist()
    assert found["imbalance"] == pytest.approx(rows_K.max() / rows_K.min())
    share_K = rows_K / rows_K.sum()
    assert found["entropy"] == pytest.approx(-sum(share * np.log(share) for share in share_K) / np.log(4))
    assert found["ari"] == pytest.approx(adjusted_rand_score(label_N[train_N], cluster_N[train_N]))
    rows_ND = embeddings(table)[train_N]
    assert found["silhouette"] == pytest.approx(silhouette_score(rows_ND, cluster_N[train_N]), abs=1e-6)
    values_N = silhouette_samples(rows_ND, cluster_N[train_N])
    means = [values_N[cluster_N[train_N] == cluster].mean() for cluster in range(4)]
    assert found["silhouette_K"] == pytest.approx(means, abs=1e-6)


def test_the_silhouette_is_that_of_the_rows_of_lowest_rank() -> None:
    config = made_config()
    table, cluster_N = groups(config, [2000, 1500, 1500, 1500], spread=1.0)
    found = surveyed(config, table, cluster_N).info
    train = np.flatnonzero(training(table))
    assert len(train) > PROJECTED_ROWS > SILHOUETTE_ROWS
    rank_N = ranks(table["id"].to_pylist())
    chosen = train[np.argsort(rank_N[train])][:SILHOUETTE_ROWS]
    expected = silhouette_score(embeddings(table)[chosen], cluster_N[chosen])
    assert found["silhouette"] == pytest.approx(expected, abs=1e-6)


def test_spherical_clusters_are_measured_by_direction() -> None:
    config = made_config(metric="spherical")
    table, cluster_N = groups(config, [100, 100, 100, 100], spread=0.1)
    rows_ND = embeddings(table) * np.random.default_rng(0).uniform(0.1, 10, (400, 1))
    longer = table.set_column(table.schema.get_field_index("embedding"), "embedding", column(rows_ND, EMBEDDING))
    as_it_is, scaled = (surveyed(config, rows, cluster_N).info["silhouette"] for rows in (table, longer))
    assert scaled == pytest.approx(as_it_is, abs=1e-5)
    euclidean = surveyed(made_config(), longer, cluster_N).info["silhouette"]
    assert euclidean < as_it_is - 0.2


@pytest.mark.parametrize(("share", "loud"), [(0.41, True), (0.14, False)])
def test_a_catch_all_cluster_is_warned_of(share: float, loud: bool) -> None:
    config = made_config(num_clusters=8)
    large = round(2000 * share)
    table, cluster_N = groups(config, [*[(2000 - large) // 7] * 3, large, *[(2000 - large) // 7] * 4])
    report = surveyed(config, table, cluster_N)
    exact = report.info["rows_K"][3] / sum(report.info["rows_K"])
    assert exact == pytest.approx(share, abs=0.02)
    expected = f"cluster 3 has {exact:.0%} of the training rows, where an equal share is 12%"
    assert [line.startswith(expected) and "max_share" in line for line in report.warnings] == [True] * loud
    assert (f"Warning: {expected}" in report.files["report.html"].decode()) is loud


def of_clusters(report: Report) -> list[str]:
    """The warnings but for that of empty classes, which groups leave of recipe tiny's."""
    return [line for line in report.warnings if "classes have no training row" not in line]


def test_classes_without_rows_are_warned_of() -> None:
    config = made_config(method="given")
    infos = [{"rows_train": 100, "rows_heldout": 9, "counts_C": [0, *[10] * 8, 0]} for _ in range(4)]
    assert "2 of 10 classes have no training row: 0, 9" in given_report(config, infos).warnings
    for info in infos:
        info["counts_C"] = [10] * 10
    assert given_report(config, infos).warnings == []


@pytest.mark.parametrize(("rows_K", "warned"), [([100], []), ([89, 11], []), ([95, 9], [0]), ([50, 25, 29], [])])
def test_an_equal_share_of_few_clusters_is_no_catch_all(rows_K: list[int], warned: list[int]) -> None:
    config = made_config(len(rows_K), batch=2, method="given")
    infos = [{"rows_train": rows, "rows_heldout": 0, "counts_C": [rows] + [0] * 9} for rows in rows_K]
    assert [int(line.split()[1]) for line in of_clusters(given_report(config, infos))] == warned


def test_tiny_clusters_are_warned_of() -> None:
    config = made_config(num_clusters=4, batch=64)
    table, cluster_N = groups(config, [300, 70, 60, 300])
    (line,) = of_clusters(surveyed(config, table, cluster_N))
    assert line.startswith("clusters 1, 2 have fewer training rows than a batch of an expert, 64;")
    assert of_clusters(surveyed(made_config(num_clusters=4, batch=8), table, cluster_N)) == []
    infos = [{"rows_train": rows, "rows_heldout": 0, "counts_C": []} for rows in (10_000, 10_000, 10_000, 700)]
    (line,) = of_clusters(given_report(made_config(num_clusters=4, batch=64, method="given"), infos))
    assert line == "cluster 3 has fewer training rows than a tenth of an equal share, 767"


def test_clusters_without_borders_are_warned_of() -> None:
    config = made_config()
    table, cluster_N = groups(config, [100, 100, 100, 100])
    at_random_N = np.random.default_rng(0).permutation(cluster_N)
    (line,) = of_clusters(surveyed(config, table, at_random_N))
    assert line.startswith("the silhouette is -0.0")
    assert of_clusters(surveyed(made_config(method="random"), table, at_random_N)) == []
    assert of_clusters(surveyed(config, table, cluster_N)) == []


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
    files = surveyed(config, table, cluster_N).files
    assert set(files) == {"report.html", "clusters.png", "projection.png", "fine.png"}
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
    assert surveyed(config, table, cluster_N) == surveyed(config, table, cluster_N, mixed)


def test_images_are_the_nearest_and_those_of_lowest_rank() -> None:
    config = made_config()
    table, cluster_N = groups(config, [80, 40, 60, 5])
    picture = Image.open(io.BytesIO(surveyed(config, table, cluster_N).files["clusters.png"])).convert("L")
    distance_N = distances_of(table, cluster_N, centroids_of(table, cluster_N))
    rank_N = ranks(table["id"].to_pylist())
    step = TILE + GAP
    left = picture.width - 2 * (IMAGES * step + 20)
    for cluster in range(4):
        mine = np.flatnonzero(training(table) & (cluster_N == cluster))
        shown = [mine[np.argsort(key_N[mine])][:IMAGES] for key_N in (distance_N, rank_N)]
        y = picture.height - 10 - (4 - cluster) * step + TILE // 2
        for group, rows in enumerate(shown):
            begin = left + group * (IMAGES * step + 20)
            shades = [picture.getpixel((begin + place * step + TILE // 2, y)) for place in range(IMAGES)]
            assert shades == [int(row) % 251 for row in rows] + [255] * (IMAGES - len(rows))


def test_latents_are_shown_by_thumbnails_and_texts_by_captions() -> None:
    config = made_config(data=TEXTS)
    table, cluster_N = groups(config, [30, 30, 30, 30])
    report = surveyed(config, table, cluster_N)
    assert report.info["counts_CK"] == []
    assert report.info["ari"] is None
    picture = Image.open(io.BytesIO(report.files["clusters.png"])).convert("L")
    rank_N = ranks(table["id"].to_pylist())
    words = _Page(report.files["report.html"].decode()).words
    for cluster in range(4):
        mine = np.flatnonzero(training(table) & (cluster_N == cluster))
        rows = mine[np.argsort(rank_N[mine])]
        x = picture.width - (IMAGES * (TILE + GAP) + 20) + TILE // 2
        y = picture.height - 10 - (4 - cluster) * (TILE + GAP) + TILE // 2
        assert picture.getpixel((x, y)) == pytest.approx(rows[0], abs=3)
        assert "; ".join(f"<number> {row}" for row in rows[:3]) in words


def test_without_centroids_there_are_clusters_to_see_all_the_same() -> None:
    config = made_config(method="random")
    table, cluster_N = groups(config, [50, 50, 50, 50])
    survey = Survey(config, 4)
    left_out = np.where(np.arange(200) % 10 == 0, -1, cluster_N)
    survey.add(table, left_out, None)
    report = survey.report(None)
    assert set(report.files) == {"report.html", "clusters.png", "projection.png"}
    assert sum(report.info["rows_K"]) + sum(report.info["rows_heldout_K"]) == 180
    few = Survey(made_config(num_clusters=1, method="random"), 1)
    few.add(table.slice(0, 1), np.zeros(1, np.int64), None)
    assert few.report(None).info["silhouette"] is None


def test_the_report_of_given_shards_needs_no_rows() -> None:
    config = made_config(num_clusters=2, method="given")
    infos = [
        {"rows_train": 60, "rows_heldout": 3, "counts_C": [10, 50, *[0] * 8]},
        {"rows_train": 40, "rows_heldout": 5, "counts_C": [0, 0, *[5] * 8]},
    ]
    report = given_report(config, infos)
    assert set(report.files) == {"report.html"}
    assert report.info["counts_CK"] == np.array([info["counts_C"] for info in infos]).T.tolist()
    assert report.info["rows_K"] == [60, 40]
    assert report.info["rows_heldout_K"] == [3, 5]
    assert report.info["imbalance"] == 1.5
    label_N = np.repeat([0, 1, *range(2, 10)], [10, 50, *[5] * 8])
    assert report.info["ari"] == pytest.approx(adjusted_rand_score(label_N, np.repeat([0, 1], [60, 40])))
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
    survey = Survey(config, 4)

    def feed(first: int, last: int) -> int:
        for part in range(first, last):
            ids = pa.array([f"{part}/{number}" for number in range(table.num_rows)])
            survey.add(table.set_column(0, "id", ids), cluster_N, distance_N)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = feed(0, 10)
    after = feed(10, 110)
    fed = 100 * table.nbytes
    assert fed > 150 * 2**20
    assert after - before < 16 * 2**20
