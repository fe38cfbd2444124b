"""The first week's material: images as people have them, the same in each format; and what counts as a surprise."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ddm_ray.config import DataConfig
from ddm_ray.data.images import decode
from ddm_ray.data.sources import Encoded, open_source

pytestmark = pytest.mark.contract


def rows_of(config: DataConfig, folder: Path) -> list[Encoded]:
    source = open_source(config, str(folder))
    listing = source.list()
    planned = source.planned(source.chunk_rows, listing.classes, numbered=listing.numbered)
    return [row for unit in listing.units for chunk in planned.read(unit) for row in chunk.rows]


def test_the_messy_folder_is_what_it_says_and_the_same_in_each_format(
    benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    photos = benchmark("messy_photos")
    messy = photos.write_messy(tmp_path / "photos", 60)
    photos.write_parquet(messy, tmp_path / "parquet")
    photos.write_tars(messy, tmp_path / "tars")
    config = DataConfig(class_names=photos.CLASSES)
    rows = rows_of(config, messy.folder)
    assert sorted(row.id for row in rows) == sorted((*messy.good, *messy.broken)) and len(messy.good) == 60
    unusable = []
    for row in rows:
        try:
            assert row.image is not None and decode(row.image, (3, 32, 32)).shape == (32, 32, 3)
        except (OSError, ValueError):
            unusable.append(row.id)
    assert sorted(unusable) == [*messy.broken]
    assert all(any(name.endswith(form) for name in messy.good) for form in photos.FORMS)
    like = Counter((row.condition, row.image) for row in rows)
    assert max(like.values()) > 1, "duplicates"
    for name in ("parquet", "tars"):
        assert Counter((row.condition, row.image) for row in rows_of(config, tmp_path / name)) == like


@pytest.mark.parametrize(
    ("status", "text", "surprises"),
    [
        (0, "rows 100%  2000 rows, 3 rejected (38 s)\nwarning: 1 files aren't read: 1 .txt\n", 0),
        (1, "device: workers train on the CPU\nerror: storage is full\n", 0),
        (-9, "rows 10%\n", 0),
        (1, "it failed\n", 1),
        (0, "error: none\n", 1),
        (1, "Traceback (most recent call last):\nerror: ...\n", 1),
        (0, "[2026-11-26 11:23:47,106 E 20718 20718] core_worker.cc:2465: Actor with class name\n", 1),
        (0, "(raylet) a worker died\n(RayTrainWorker pid=712) step 3\n", 2),
        (0, "/usr/lib/x.py:7: FutureWarning: soon\n", 1),
    ],
)
def test_what_nobody_should_have_to_read_is_counted(
    benchmark: Callable[[str], ModuleType], status: int, text: str, surprises: int
) -> None:
    assert len(benchmark("terminal").Typed(("train", "run"), status, text, 1.0).surprises()) == surprises
