"""Pictures that packages ship, as sources: how many, which, in which classes, and which are held out together."""

import io
import sys
from collections import defaultdict
from functools import cache

import pytest
from PIL import Image

from ddm_ray.config import DataConfig
from ddm_ray.data.prepare.decoding import decode_rows
from ddm_ray.data.sources import Encoded, open_source
from ddm_ray.errors import DataError
from ddm_ray_study.pictures import KINDS, PHOTOGRAPHS
from tests.conftest import ROOT

pytestmark = pytest.mark.chaos
COUNTS = {"emoji": 1865, "icons": 896, "sprites": 1295, "textures": 1865, "satellite": 2000}
CROPS = {"china": 1000, "astronaut": 978, "chelsea": 504, "coffee": 925, "coins": 432}
"""Distinct crops of a photograph, at most 1,000."""
CONFIG = DataConfig(image_size=32, channels=3, class_names=tuple(KINDS))
PATCHES = DataConfig(image_size=8, channels=3, class_names=tuple(PHOTOGRAPHS))


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


@pytest.mark.parametrize(("kind", "config", "source"), [("sprites", CONFIG, "domains"), ("retina", PATCHES, "patches")])
def test_a_scene_is_held_out_as_one(kind: str, config: DataConfig, source: str) -> None:
    """Rows of different scenes aren't."""
    rows = rows_of(kind, config, source)
    sides = defaultdict(set)
    for row, fraction in zip(rows, decode_rows(rows, config).holdout_fractions(), strict=True):
        sides[row.scene].add(bool(fraction < config.heldout))
    assert len(sides) > 100 and all(len(side) == 1 for side in sides.values())
    assert {True, False} == set.union(*sides.values())


@pytest.mark.parametrize(
    ("module", "package", "source"), [("vizdoom", "vizdoom", "domains"), ("skimage", "scikit-image", "patches")]
)
def test_a_missing_package_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, source: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=f"{package}, which isn't installed: pip install ./study"):
        open_source(CONFIG, source).list()
