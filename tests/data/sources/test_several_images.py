"""Several images of one key of a tar: one of them is used at most, and the others are losses that count."""

from ddm_ray.config import DataConfig
from ddm_ray.data.sources import Encoded
from ddm_ray.data.sources.webdataset import STATED_BYTES, TWICE
from tests.data.sources.test_sources import COLOURS
from tests.data.sources.test_sources_formats import IMAGE, tar_rows


def test_several_images_of_one_key_are_as_many_losses(tmp_path):
    """The key ends at the first dot: losses are counted in images, whatever a sample is."""
    numbered = [(f"IMG.{number:04d}.png", IMAGE) for number in range(200)]
    rows = tar_rows(tmp_path, *numbered, ("b.png", IMAGE), ("b.cls", b"1"))
    assert rows[-1] == Encoded("x.tar/b", IMAGE, 1) and len({row.id for row in rows}) == 201
    (problem,) = {row.problem for row in rows[:-1]}
    assert problem.startswith(
        "several images have the key 'IMG', which ends at the first dot of a name: 0000.png, 0001"
    )
    two = tar_rows(tmp_path, ("a.png", IMAGE), ("a.jpg", IMAGE), ("a.cls", b"1"))
    assert [(row.id, row.problem) for row in two] == [
        (f"x.tar/a.{name}", "several images: png, jpg; data.image_column chooses one") for name in ("png", "jpg")
    ]
    with_mask = tar_rows(tmp_path, ("a.png", IMAGE), ("a.mask.png", IMAGE), ("a.cls", b"1"))
    assert with_mask == [Encoded("x.tar/a", IMAGE, 1)]


def test_pictures_beside_the_one_of_a_key_are_losses(tmp_path):
    pictures = [(f"IMG.{ending}", IMAGE) for ending in ("png", "1.png", "2.png", "mask_0.png", "depth16.png")]
    rows = tar_rows(tmp_path, *pictures, ("IMG.cls", b"1"))
    assert rows[0] == Encoded("x.tar/IMG", IMAGE, 1)
    problem = "several images have the key 'IMG', which ends at the first dot of a name: png, 1.png, 2.png"
    assert rows[1:] == [Encoded(f"x.tar/IMG.{number}.png", None, None, problem) for number in (1, 2)]
    chosen = DataConfig(class_names=COLOURS, image_column="png")
    assert tar_rows(tmp_path, *pictures, ("IMG.cls", b"1"), config=chosen) == rows[:1]


def test_a_sample_that_is_refused_is_as_many_losses_as_it_has_pictures(tmp_path):
    pictures = [(f"IMG.{ending}", IMAGE) for ending in ("png", "1.png", "jpg")]
    rows = tar_rows(tmp_path, *pictures, ("IMG.cls", b"1" * (STATED_BYTES + 1)))
    assert len({row.id for row in rows}) == 3
    assert {row.problem for row in rows} == {f"its cls has {STATED_BYTES + 1} bytes, more than {STATED_BYTES}"}
    rows = tar_rows(
        tmp_path, ("a.png", IMAGE), ("a.cls", b"1"), ("b.png", IMAGE), ("b.cls", b"1"), *pictures[:2], *pictures
    )
    assert len({row.id for row in rows}) == 7 and [row.problem for row in rows].count(TWICE) == 3
