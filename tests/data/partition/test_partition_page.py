"""The page of a partition's report: its images, its table, and nothing that it would fetch."""

import base64
import io
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from sklearn.metrics import adjusted_rand_score

from ddm_ray.data.order import shuffle_keys
from ddm_ray.data.partition import report_builder
from ddm_ray.data.partition.report_builder import IMAGES, ReportBuilder
from tests.data.partition.report_rows import TEXTS, built, groups, info_of, made_config, training


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


def shades(page: _Page, clusters: int) -> list[list[int]]:
    """The shades of each cluster's images."""
    images = [Image.open(io.BytesIO(image)).convert("L").getpixel((0, 0)) for image in page.images]
    assert len(images) % clusters == 0
    return np.reshape(images, (clusters, -1)).tolist()


def lowest(table: pa.Table, mine_N: np.ndarray) -> list[int]:
    """The training rows of lowest keys among these."""
    mine = np.flatnonzero(training(table) & mine_N)
    key_N = shuffle_keys(table["id"].to_pylist())
    return mine[np.argsort(key_N[mine])][:IMAGES].tolist()


@pytest.mark.parametrize(("side", "method"), [(8, "embeddings"), (96, "embeddings"), (8, "random")])
def test_images_are_those_of_lowest_keys_and_nothing_is_fetched(side: int, method: str) -> None:
    config = made_config(data={"image_size": side}, method=method)
    table, cluster_N = groups(config, [80, 40, 60, 20])
    page = _Page(built(config, table, cluster_N).html.decode())
    sentences = "Images that are left out: 2 (no <label>). Images that lost something: 2 (its colour profile)."
    assert page.fetched == [] and any(f"{sentences} Pictures: Ada <b>" in words for words in page.words)
    assert {Image.open(io.BytesIO(image)).size for image in page.images} == {(min(side, 64),) * 2}
    expected = [[row % 251 for row in lowest(table, cluster_N == cluster)] for cluster in range(4)]
    assert shades(page, 4) == expected


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


def test_the_report_of_given_shards_needs_no_rows() -> None:
    config = made_config(num_clusters=2, method="given")
    info = info_of([(60, 3, [10, 50, *[0] * 8]), (40, 5, [0, 0, *[5] * 8])])
    page = _Page(ReportBuilder(config, info, 0).build().html.decode())
    assert page.images == []
    assert (info.rows_K, info.rows_heldout_K) == ((60, 40), (3, 5))
    label_N = np.repeat([0, 1, *range(2, 10)], [10, 50, *[5] * 8])
    assert info.ari == pytest.approx(adjusted_rand_score(label_N, np.repeat([0, 1], [60, 40])))
    assert "1 (83%), 0 (17%)" in page.words
