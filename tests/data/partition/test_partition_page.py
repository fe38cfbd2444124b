"""The page of a partition's report: its images, its table, and nothing that it would fetch."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from sklearn.metrics import adjusted_rand_score

from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition import report_builder
from ddm_ray.data.partition.report_builder import IMAGES
from tests.data.partition.report_rows import (
    TEXTS,
    begun,
    built,
    centroids_of,
    groups,
    info_of,
    made_config,
    training,
    without_rows,
)


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
    page = _Page(built(config, table, cluster_N).html.decode())
    assert page.fetched == []
    assert {"tiny: 4 clusters", "12 <b>", "euclidean", "digits"} <= set(page.words)
    sizes = [Image.open(io.BytesIO(image)).size for image in page.images]
    assert sizes == [(8, 8)] * 4 * IMAGES + [(900, 650)]


def shades(page: _Page, clusters: int) -> list[list[int]]:
    """The shades of each cluster's images, which come before the last picture."""
    images = [Image.open(io.BytesIO(image)).convert("L").getpixel((0, 0)) for image in page.images[:-1]]
    assert len(images) % clusters == 0
    return np.reshape(images, (clusters, -1)).tolist()


def lowest(table: pa.Table, mine_N: np.ndarray) -> list[int]:
    """The training rows of lowest keys among these."""
    mine = np.flatnonzero(training(table) & mine_N)
    key_N = shuffle_keys(table["id"].to_pylist())
    return mine[np.argsort(key_N[mine])][:IMAGES].tolist()


def test_images_are_those_of_lowest_keys() -> None:
    config = made_config()
    table, cluster_N = groups(config, [80, 40, 60, 20])
    page = _Page(built(config, table, cluster_N).html.decode())
    expected = [[row % 251 for row in lowest(table, cluster_N == cluster)] for cluster in range(4)]
    assert shades(page, 4) == expected


def test_a_large_image_is_made_small() -> None:
    config = made_config(data={"image_size": 96})
    table, cluster_N = groups(config, [20, 20, 20, 20])
    page = _Page(built(config, table, cluster_N).html.decode())
    assert {Image.open(io.BytesIO(image)).size for image in page.images[:-1]} == {(64, 64)}


def test_images_of_the_largest_clusters_alone_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_builder, "SHOWN_CLUSTERS", 2)
    config = made_config()
    table, cluster_N = groups(config, [20, 80, 60, 30])
    page = _Page(built(config, table, cluster_N).html.decode())
    assert shades(page, 2) == [[row % 251 for row in lowest(table, cluster_N == cluster)] for cluster in (1, 2)]


def test_latents_are_shown_by_thumbnails_and_texts_by_captions() -> None:
    config = made_config(data=TEXTS)
    table, cluster_N = groups(config, [30, 30, 30, 30])
    page = _Page(built(config, table, cluster_N).html.decode())
    for cluster, seen in enumerate(shades(page, 4)):
        rows = lowest(table, cluster_N == cluster)
        assert seen == pytest.approx(rows, abs=3)
        assert "; ".join(f"<number> {row}" for row in rows[:3]) in page.words


def test_without_centroids_there_are_clusters_to_see_all_the_same() -> None:
    config = made_config(method="random")
    table, cluster_N = groups(config, [50, 50, 50, 50])
    builder = begun(config, table, cluster_N)
    builder.add(table, cluster_N, None)
    report = builder.build(None, {})
    page = _Page(report.html.decode())
    assert len(page.images) == 4 * IMAGES + 1 and "next cluster" not in page.words
    assert report.info.far_K == () and "far_K" not in report.info.as_json()
    single = made_config(num_clusters=1, method="random")
    few = begun(single, table.slice(0, 1), np.zeros(1, np.int64))
    few.add(table.slice(0, 1), np.zeros(1, np.int64), None)
    assert few.build(None, {}).info.silhouette is None


def test_the_next_cluster_is_the_nearest_other_one() -> None:
    config = made_config()
    table, cluster_N = groups(config, [50, 50, 50, 50])
    words = _Page(built(config, table, cluster_N).html.decode()).words
    coarse_KD = centroids_of(table, cluster_N).coarse_KD
    distance_KK = np.linalg.norm(coarse_KD[:, None] - coarse_KD, axis=2) + np.diag([np.inf] * 4)
    expected = [f"{row_K.argmin()} at {row_K.min():.3g}" for row_K in distance_KK]
    assert [word for word in words if re.fullmatch(r"\d at [\d.]+", word)] == expected


def test_the_report_of_given_shards_needs_no_rows() -> None:
    config = made_config(num_clusters=2, method="given")
    info = info_of([(60, 3, [10, 50, *[0] * 8]), (40, 5, [0, 0, *[5] * 8])])
    page = _Page(without_rows(config, info).html.decode())
    assert page.images == []
    assert (info.rows_K, info.rows_heldout_K, info.imbalance) == ((60, 40), (3, 5), 1.5)
    label_N = np.repeat([0, 1, *range(2, 10)], [10, 50, *[5] * 8])
    assert info.ari == pytest.approx(adjusted_rand_score(label_N, np.repeat([0, 1], [60, 40])))
    assert "1 (83%), 0 (17%)" in page.words
