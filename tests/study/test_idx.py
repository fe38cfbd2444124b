"""IDX files, as MNIST and Fashion-MNIST come: each image with its label, and what is cut off is told."""

import gzip
import io
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ddm_ray.config import DataConfig
from ddm_ray.data.sources import open_source
from ddm_ray.errors import DataError
from tests.data.sources.test_sources import everything

CONFIG = DataConfig(num_classes=3, image_size=4, channels=1)
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def written(folder: Path, images_NHW: np.ndarray, label_N: np.ndarray, ending: str = "") -> Path:
    pack = gzip.compress if ending else bytes
    folder.mkdir(exist_ok=True)
    (folder / f"{IMAGES}{ending}").write_bytes(pack(idx(images_NHW)))
    (folder / f"{LABELS}{ending}").write_bytes(pack(idx(label_N)))
    return folder


def drawn(count: int, height: int = 5, width: int = 4) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(count)
    return random.integers(256, size=(count, height, width), dtype=np.uint8), (np.arange(count) % 3).astype(np.uint8)


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 9), height=st.integers(1, 7), width=st.integers(1, 7), ending=st.sampled_from(["", ".gz"]))
def test_images_come_with_their_labels_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, count: int, height: int, width: int, ending: str
) -> None:
    images_NHW, label_N = drawn(count, height, width)
    folder = written(tmp_path_factory.mktemp("idx"), images_NHW, label_N, ending)
    rows = everything(open_source(CONFIG, str(folder)))
    assert [row.condition for row in rows] == label_N.tolist()
    assert len({row.id for row in rows}) == count
    assert rows[0].id == f"{IMAGES}{ending}/0"
    for row, pixels_HW in zip(rows, images_NHW, strict=True):
        assert row.image
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(row.image))), pixels_HW)


def test_training_and_test_sets_and_other_spellings(tmp_path: Path) -> None:
    for name, count in (("train-images.idx3-ubyte", 4), ("t10k-images-idx3-ubyte.gz", 2)):
        images_NHW, label_N = drawn(count)
        labels = name.replace("images", "labels").replace("idx3", "idx1")
        (tmp_path / name).write_bytes(gzip.compress(idx(images_NHW)) if name.endswith("gz") else idx(images_NHW))
        (tmp_path / labels).write_bytes(gzip.compress(idx(label_N)) if name.endswith("gz") else idx(label_N))
    assert len(everything(open_source(CONFIG, str(tmp_path)))) == 6
    only = everything(open_source(CONFIG, str(tmp_path / "t10k-{images-idx3,labels-idx1}-ubyte.gz")))
    assert [row.id for row in only] == [f"t10k-images-idx3-ubyte.gz/{index}" for index in range(2)]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("name", [IMAGES, LABELS])
def test_a_file_cut_off_anywhere_is_refused_by_name(tmp_path: Path, name: str, ending: str) -> None:
    path = written(tmp_path, *drawn(3), ending) / f"{name}{ending}"
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match=f"{name}{ending}"):
            everything(open_source(CONFIG, str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (IMAGES, idx(np.zeros((3, 5, 4), np.uint8)) + b"x", "goes on after what its header tells of"),
        (LABELS, idx(np.zeros(4, np.uint8)), "has 4 labels, for 3 images"),
        (IMAGES, idx(np.zeros((3, 5), np.uint8)) + bytes(9), "isn't an IDX file of bytes in 3 dimensions"),
        (IMAGES, struct.pack(">HBBIII", 0, 8, 3, 1, 2**31, 2**31), "has images of 2147483648 x 2147483648 pixels"),
        (IMAGES, struct.pack(">HBBIII", 0, 8, 3, 2**27, 4, 4) + bytes(16), r"ends after 1 of 134217728 images"),
        (LABELS, struct.pack(">HBBI", 0, 8, 1, 2**32 - 1), "has 4294967295 rows, more than 134217728; split"),
    ],
)
def test_what_a_header_says_wrongly(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    written(tmp_path, *drawn(3))
    (tmp_path / name).write_bytes(content)
    # Without classes no labels are asked for.
    config = DataConfig(num_classes=1, image_size=4, channels=1) if "ends after" in problem else CONFIG
    with pytest.raises(DataError, match=f"{name}.*{problem}"):
        everything(open_source(config, str(tmp_path)))


def test_labels_that_are_not_there_or_out_of_range(tmp_path: Path) -> None:
    images_NHW, _ = drawn(3)
    written(tmp_path, images_NHW, np.array([0, 7, 2], np.uint8))
    rows = everything(open_source(CONFIG, str(tmp_path)))
    assert [row.problem for row in rows] == [None, "label 7 is not in 0..2", None]
    (tmp_path / LABELS).unlink()
    with pytest.raises(DataError, match=f"its labels, {LABELS}, aren't among the files of data.source"):
        everything(open_source(CONFIG, str(tmp_path)))
    (tmp_path / IMAGES).unlink()
    (tmp_path / LABELS).write_bytes(idx(np.zeros(3, np.uint8)))
    with pytest.raises(DataError, match="no IDX files of images in it"):
        open_source(CONFIG, str(tmp_path)).list()
