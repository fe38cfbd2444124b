"""A first look at a source: what it says, what it refuses, and that it is short."""

from pathlib import Path

import pytest
from PIL import Image

from ddm_ray.config import RunConfig, load_recipe
from ddm_ray.data.sources.chunks import MIN_PART_ROWS
from ddm_ray.data.sources.folder import Folder
from ddm_ray.data.sources.look import look
from ddm_ray.errors import DataError
from tests.data.sources.test_class_names import write_labelled
from tests.data.sources.test_sources import WRITERS, picture, tar_of, write_folder

pytestmark = pytest.mark.contract

FEW = ("embedder.dim=2", "partition.num_fine=2")


def config(folder: Path, *settings: str) -> RunConfig:
    return load_recipe("tiny", (f"data.source={folder}", "data.num_classes=3", *FEW, *settings))


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """Thirty images in three folders, a large one, and what can't be read."""
    write_folder(tmp_path / "photos", 30)
    Image.new("RGB", (300, 200)).save(tmp_path / "photos/red/000.jpg")
    (tmp_path / "photos/blue/002.png").write_bytes(picture(2)[:20])
    for name in ("a.heic", "b.heic", "notes.txt", ".hidden", "red/loose.mov"):
        (tmp_path / "photos" / name).write_bytes(b"x")
    (tmp_path / "photos/stray.png").write_bytes(picture(0))
    return tmp_path / "photos"


def test_a_messy_folder_is_described(messy: Path) -> None:
    seen = look(config(messy))
    files, classes, images = seen.lines
    assert files.startswith(f"{messy}: 31 .png, 1 .jpg, ")
    assert classes == "classes: blue 10, green 10, red 11"
    assert images.endswith("images looked at: 8 x 8 to 300 x 200 pixels")
    assert seen.folders == {"blue": 10, "green": 10, "red": 11}
    ignored, outside, broken = seen.warnings
    assert ignored.startswith("5 files aren't read: 2 .heic, ")
    assert ignored.endswith("; convert the photographs (.heic) to JPEG or PNG first")
    assert outside == "images in no class's folder are left out: 1"
    assert broken.startswith("blue/002.png can't be used: ")


def test_classes_that_no_folder_has_and_small_images_are_warned_of(messy: Path) -> None:
    warnings = look(config(messy, "data.num_classes=5", "data.image_size=16")).warnings
    assert any("2 of 5 classes (data.num_classes) have no folder" in warning for warning in warnings)
    assert any("smaller than the 16 pixels that are modelled (8 and less)" in warning for warning in warnings)


@pytest.mark.parametrize("kind", WRITERS)
def test_all_kinds_of_files_are_looked_into(tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path, 45)
    seen = look(config(tmp_path))
    assert seen.lines[-1].endswith("images looked at: 8 x 8 pixels") and not seen.warnings


def test_classes_of_parquet_are_named(tmp_path: Path) -> None:
    write_labelled(tmp_path / "a.parquet", rows=31)
    files, classes, _ = look(config(tmp_path)).lines
    assert files.endswith(", 31 rows") and files.startswith(f"{tmp_path}: 1 .parquet, ")
    assert classes == "classes: blue, red, green"
    with pytest.raises(DataError, match="31 images are too few for the 32 components"):
        look(config(tmp_path, "embedder.dim=32"))


def test_what_is_made_here_has_nothing_to_look_at() -> None:
    for source in ("digits", "shapes:100"):
        assert look(load_recipe("tiny", (f"data.source={source}", "data.num_classes=12"))).lines == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((), r"no such folder or file; give a folder, a URI .*; did you mean .*/photos\?"),
        (("data.source={}/photos", "embedder.dim=32"), "32 images are too few for the 32 components"),
        (("data.source={}/photos", "partition.num_clusters=32", "partition.num_fine=32"), "too few for 32 clusters"),
        (("data.source={}/broken",), "none of 9 images looked at can be used: .*, e.g. a/0.png"),
        (("data.source={}/unlabelled.tar",), "none of 4 images looked at can be used: no label, e.g. unlabelled.tar/0"),
        (("data.source={}/digit",), r"did you mean digits\?"),
        (("data.source={}/photos/stray.png", "data.num_classes=1"), "has 1 images, too few to train on any; put more"),
        (("data.source={}/empty.tar",), "has 0 images, too few to train on any; put more"),
    ],
)
def test_what_will_not_work_is_refused_at_once(messy: Path, settings: tuple[str, ...], message: str) -> None:
    root = messy.parent
    (root / "broken/a").mkdir(parents=True)
    for index in range(9):
        (root / f"broken/a/{index}.png").write_bytes(b"no image")
    tar_of(root / "empty.tar")
    tar_of(root / "unlabelled.tar", *((f"{index}.png", picture(index)) for index in range(4)))
    chosen = tuple(setting.format(root) for setting in settings)
    with pytest.raises(DataError, match=message):
        look(config(root / "phots", *chosen))


def test_a_folder_is_read_in_parts_that_a_kill_costs_no_more_than() -> None:
    """Many small images once were one part: progress stood at none until all was done."""
    units = Folder().units
    for count in (1, 2730, 200_000, 1_000_000):
        parts = units({f"{index:07d}": 1 for index in range(count)}, 4096)
        assert [file for part in parts for file in part.files] == [f"{index:07d}" for index in range(count)]
        assert max(len(part.files) for part in parts) <= max(MIN_PART_ROWS, min(4096, count // 64))
    assert len(units({f"{index:04d}": 1 for index in range(2730)}, 4096)) == 22
    assert {len(part.files) for part in units({f"{index:03d}": 1 for index in range(640)}, 64)} == {64}
