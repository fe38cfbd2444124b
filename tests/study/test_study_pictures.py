"""Pictures that packages ship, as sources: how many, which, in which classes, and which are held out together."""

import io
import sys
from collections import defaultdict
from functools import cache

import numpy as np
import pytest
from PIL import Image

from ddm_ray.config import DataConfig, TextConfig
from ddm_ray.data.prepare.decoding import decode_rows
from ddm_ray.data.sources import Encoded, absolute_name, open_source
from ddm_ray.errors import DataError
from ddm_ray_study.pictures import KINDS, PHOTOGRAPHS, crops_of_a_photograph, emoji
from ddm_ray_study.sources import EMOJI_GROUPS
from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("every_call")
COUNTS = {"emoji": 1865, "icons": 896, "sprites": 1295, "textures": 1865, "satellite": 2000}
CROPS = {"china": 1000, "astronaut": 978, "chelsea": 504, "coffee": 925, "coins": 432}
"""Distinct crops of a photograph, at most 1,000."""
CONFIG = DataConfig(image_size=32, channels=3, class_names=tuple(KINDS))
PATCHES = DataConfig(image_size=8, channels=3, class_names=tuple(PHOTOGRAPHS))
CAPTIONED = DataConfig(image_size=32, channels=3, text=TextConfig(encoder="clip", tokens=4, dim=8))


@cache
def rows_of(kind: str, config: DataConfig = CONFIG, source: str = "domains") -> list[Encoded]:
    opened = open_source(config, source)
    listing = opened.list()
    planned = opened.planned(opened.chunk_rows, listing.classes)
    (unit,) = (unit for unit in listing.units if unit.key == kind)
    return [row for chunk in planned.read(unit) for row in chunk.rows]


@pytest.mark.parametrize("kind", COUNTS)
def test_a_kind_has_its_distinct_pictures(kind: str) -> None:
    rows = rows_of(kind)
    assert len(rows) == COUNTS[kind] and [row.id for row in rows] == sorted({row.id for row in rows})
    assert {row.condition for row in rows} == {[*KINDS].index(kind)}
    assert len({row.image for row in rows}) == len(rows)
    image = Image.open(io.BytesIO(rows[0].image or b""))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (32, 32))


@pytest.mark.parametrize("photograph", CROPS)
def test_a_photograph_has_its_distinct_crops(photograph: str) -> None:
    rows = rows_of(photograph, PATCHES, "patches")
    assert len({row.image for row in rows}) == len(rows) == CROPS[photograph]
    assert {row.condition for row in rows} == {[*PHOTOGRAPHS].index(photograph)}
    assert {Image.open(io.BytesIO(row.image or b"")).size for row in rows} == {(8, 8)}
    assert rows_of(photograph, PATCHES, "patches:40") == rows[:40]


def test_there_are_as_many_crops_as_readme_says() -> None:
    readme = (ROOT / "study/README.md").read_text()
    for source, total in (("patches", 14839), ("patches:7000", 23444)):
        assert sum(len(rows_of(photograph, PATCHES, source)) for photograph in PHOTOGRAPHS) == total
        assert f"{total:,}" in readme


def test_neighbouring_crops_share_a_scene() -> None:
    """China has 40 crops a row, 26 rows: blocks of 4x4, of which the lowest have two rows."""
    scenes = np.array([crop.scene for crop in crops_of_a_photograph("sklearn", "datasets/images/china.jpg")])
    blocks = scenes.reshape(26, 40)
    assert len({*scenes}) == 7 * 10
    for row in range(0, 26, 4):
        for column in range(0, 40, 4):
            assert {*blocks[row : row + 4, column : column + 4].flat} == {blocks[row, column]}


def test_a_crop_is_a_photograph_at_half_its_size() -> None:
    """Every crop lies on a grid of 8x8 in scikit-learn's own array, each pixel the mean of four but for rounding."""
    import sklearn.datasets

    own_HWC = sklearn.datasets.load_sample_image("china.jpg")[:416].astype(float)
    halved_HWC = own_HWC.reshape(208, 2, 320, 2, 3).mean((1, 3))
    tiles_NHWC = halved_HWC.reshape(26, 8, 40, 8, 3).swapaxes(1, 2).reshape(-1, 8, 8, 3)
    for row in rows_of("china", PATCHES, "patches"):
        crop_HWC = np.asarray(Image.open(io.BytesIO(row.image or b"")), float)
        assert abs(tiles_NHWC - crop_HWC).max((1, 2, 3)).min() <= 1


def test_as_many_of_a_kind_as_one_asks_for() -> None:
    every, few = rows_of("icons"), rows_of("icons", source="domains:40")
    assert few == every[:40]
    with pytest.raises(DataError, match="domains:NUMBER has a number from 1 up"):
        open_source(CONFIG, "domains:none")
    assert absolute_name("domains:40") == "domains:40"


@pytest.mark.parametrize(("kind", "config", "source"), [("sprites", CONFIG, "domains"), ("retina", PATCHES, "patches")])
def test_a_scene_is_held_out_as_one(kind: str, config: DataConfig, source: str) -> None:
    """Rows of different scenes aren't."""
    rows = rows_of(kind, config, source)
    sides = defaultdict(set)
    for row, fraction in zip(rows, decode_rows(rows, config).holdout_fractions(), strict=True):
        sides[row.scene].add(bool(fraction < config.heldout))
    assert len(sides) > 100 and all(len(side) == 1 for side in sides.values())
    assert {True, False} == set.union(*sides.values())


def test_tones_of_skin_share_their_emojis_scene() -> None:
    plain, toned = [*emoji(tones=False)], [*emoji(tones=True)]
    assert (len(plain), len(toned)) == (1898, 3773)
    assert {drawing.scene for drawing in plain} == {drawing.scene for drawing in toned}


def test_emoji_have_nine_groups_and_names() -> None:
    config = DataConfig(image_size=32, channels=3, class_names=EMOJI_GROUPS)
    rows = rows_of("emoji", config, "emoji")
    assert sorted({row.condition for row in rows}) == [*range(9)]  # type: ignore[type-var]
    assert "grinning face" in {row.condition for row in rows_of("emoji", CAPTIONED, "emoji")}


def test_a_caption_says_the_kind_and_what_is_shown() -> None:
    captions = {row.condition for row in rows_of("icons", CAPTIONED)}
    assert "icons: 1downarrow" in captions
    assert {row.condition for row in rows_of("sprites", CAPTIONED)} == {"sprites"}


@pytest.mark.parametrize(
    ("module", "package", "source"), [("vizdoom", "vizdoom", "domains"), ("skimage", "scikit-image", "patches")]
)
def test_a_missing_package_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, source: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=f"{package}, which isn't installed: pip install ./study"):
        open_source(CONFIG, source).list()


def test_a_tile_of_open_sea_is_left_out() -> None:
    pixels = [np.asarray(Image.open(io.BytesIO(row.image or b""))) for row in rows_of("satellite")]
    assert min(each.std(axis=(0, 1)).mean() for each in pixels) > 12
