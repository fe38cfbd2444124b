import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_digits

from ddm_ray.config import DataConfig, TextConfig
from ddm_ray.data.images import decode, png
from ddm_ray.data.sources import Encoded, Source, Unit, absolute_name, chunk_rows, open_source
from ddm_ray.data.sources.folder import GONE
from ddm_ray.data.sources.shapes import FAMILIES
from ddm_ray.errors import DataError
from tests.data.broken import write_images

COLOURS = ("red", "green", "blue")
CONFIG = DataConfig(class_names=COLOURS)
CAPTIONED = DataConfig(text=TextConfig(encoder="clip", tokens=4, dim=8))


def everything(source: Source) -> list[Encoded]:
    """All rows, after a look at what is promised of chunks."""
    rows = []
    listing = source.list()
    planned = source.planned(source.chunk_rows, listing.classes)
    for unit in listing.units:
        chunks = list(planned.read(unit))
        assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
        shares = [chunk.until for chunk in chunks]
        assert shares == sorted(shares) and shares[0] > 0 and shares[-1] == 1.0
        assert all(share < 1 for share in shares[:-1])
        assert len({len(chunk.rows) for chunk in chunks[:-1]}) <= 1
        rows += [row for chunk in chunks for row in chunk.rows]
    return rows


def test_a_source_has_one_name_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("digits", "shapes:12"):
        assert absolute_name(name) == name
        assert everything(open_source(CONFIG, absolute_name(name)))
    assert absolute_name("s3://lab/faces") == "s3://lab/faces"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    assert absolute_name("photos") == str(tmp_path / "photos")
    assert absolute_name("~/photos") == absolute_name("file:///home/ada/photos") == "/home/ada/photos"
    assert absolute_name("file://localhost/home/ada/photos") == "/home/ada/photos"
    assert absolute_name("file:///home/ada/photos #1?") == "/home/ada/photos #1?", "nothing is cut off"
    with pytest.raises(DataError, match=r"/caf\\udce9': its name is not UTF-8; rename it"):
        absolute_name("caf\udce9")  # as a shell completes it


def picture(index: int) -> bytes:
    return png(np.random.default_rng(index).integers(0, 256, (8, 8), dtype=np.uint8))


def write_folder(folder: Path, count: int) -> None:
    for index in range(count):
        path = folder / COLOURS[index % 3] / f"{index:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(index))


def write_tar(folder: Path, count: int, name: str = "train-000.tar") -> Path:
    return tar_of(
        folder / name,
        *(
            (f"{index:03d}.{extension}", content)
            for index in range(count)
            for extension, content in (("png", picture(index)), ("cls", b"%d\n" % (index % 3)))
        ),
    )


def tar_of(path: Path, *members: tuple[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return path


def write_parquet(folder: Path, count: int, row_group_size: int = 10) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": picture(index), "path": f"{index}.png"} for index in range(count)]
    table = pa.table({"image": images, "label": [index % 3 for index in range(count)]})
    pq.write_table(table, folder / "part-0.parquet", row_group_size=row_group_size)
    return folder / "part-0.parquet"


WRITERS = {"folder": write_folder, "webdataset": write_tar, "parquet": write_parquet}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_row_comes_once_whatever_the_chunks(tmp_path, kind):
    WRITERS[kind](tmp_path, 45)
    rows = everything(open_source(CONFIG, str(tmp_path), chunk_rows=16))
    assert {row.image: row.condition for row in rows} == {picture(index): index % 3 for index in range(45)}
    for size in (1, 7, 64):
        assert everything(open_source(CONFIG, str(tmp_path), chunk_rows=size)) == rows


def test_digits_and_their_pixels():
    rows = everything(open_source(DataConfig(num_classes=10)))
    pixels, labels = load_digits(return_X_y=True)
    assert [row.id for row in rows] == [f"digits/{index:04d}" for index in range(1797)]
    assert [row.condition for row in rows] == labels.tolist()
    decoded = np.stack([decode(row.image, (1, 8, 8)) for row in rows]).reshape(-1, 64)
    assert (decoded == np.rint(pixels * (255 / 16))).all()


def test_shapes_depend_on_their_number_alone():
    config = DataConfig(num_classes=12, channels=3, image_size=16)
    many, few = (everything(open_source(config, f"shapes:{count}")) for count in (5000, 100))
    assert many[:100] == few
    assert many[4100].id == "shapes/00004100"
    assert len({row.image for row in many}) == len(many)
    assert np.bincount([row.condition for row in many], minlength=12).min() > 300
    assert decode(many[0].image, config.pixel_shape).shape == (16, 16, 3)


def test_built_in_sources_have_captions_and_refuse_what_does_not_fit():
    (first, *_) = everything(open_source(CAPTIONED, "shapes:20"))
    assert first.condition.removeprefix("a picture of ") in FAMILIES
    assert everything(open_source(CAPTIONED, "digits"))[3].condition == "the digit 3"
    problems = {row.problem for row in everything(open_source(CONFIG, "digits")) if row.problem}
    assert problems == {f"label {label} is not in 0..2" for label in range(3, 10)}


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (DataConfig(num_classes=10), 4096),
        (DataConfig(num_classes=1, channels=3, image_size=256), 256),
        (DataConfig(num_classes=1, channels=3, image_size=4096), 32),
    ],
)
def test_chunks_fill_so_much_memory(config, rows):
    assert chunk_rows(config) == rows


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/folder", "no such folder or file; give a folder, a URI"),
        ("gopher://pictures", "gopher:// is no source"),
        ("s3:///prefix", "names no bucket: s3://BUCKET/PREFIX"),
        ("s3:/lab/x", "has too few slashes for a URI; write file:///PATH"),
        ("file://photos", "has too few slashes for a URI; write file:///PATH"),
        ("/tmp/a-{5..1}.tar", "{5..1}, which counts down; write {1..5}"),
    ],
)
def test_what_is_no_source_is_refused_in_a_line(name, message):
    with pytest.raises(DataError) as error:
        open_source(CONFIG, name).list()
    assert message in str(error.value)
    assert str(error.value).startswith("data.source ")
    assert "\n" not in str(error.value)


def test_a_folder_of_many_formats_some_broken(tmp_path):
    sound, damaged = write_images(tmp_path, good=100)
    (tmp_path / "notes.txt").write_text("of no interest")
    for hidden in (".hidden", "__MACOSX"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "x.png").write_bytes(picture(0))
        (tmp_path / hidden / "y.png").write_bytes(picture(0))
    (tmp_path / "apples" / ".x.png").write_bytes(picture(0))
    source = open_source(DataConfig(num_classes=4), str(tmp_path), chunk_rows=64)
    rows = everything(source)
    assert source.list().ignored == {".txt": 1, "hidden": 3, "in __MACOSX (a system's)": 2}
    assert {row.id for row in rows} == sound | damaged.keys()
    assert all(row.problem is None for row in rows)
    assert {row.id: row.condition for row in rows} == {
        row.id: ["apples", "boats", "clouds", "doors"].index(row.id.split("/")[0]) for row in rows
    }


def test_links_are_followed_but_not_in_circles(tmp_path):
    write_folder(tmp_path / "real", 9)
    (tmp_path / "set").mkdir()
    os.symlink(tmp_path / "real" / "red", tmp_path / "set" / "red")
    os.symlink(tmp_path / "set", tmp_path / "real" / "red" / "round")
    (tmp_path / "set" / "blue").mkdir()
    os.symlink(tmp_path / "real" / "blue" / "002.png", tmp_path / "set" / "blue" / "one.png")
    os.symlink(tmp_path / "nowhere", tmp_path / "set" / "blue" / "two.png")
    os.symlink("a.png", tmp_path / "set" / "b.png")
    os.symlink("b.png", tmp_path / "set" / "a.png")
    os.mkfifo(tmp_path / "set" / "pipe.png")  # to open it would take for ever
    os.symlink("pipe.png", tmp_path / "set" / "c.png")
    source = open_source(CONFIG, str(tmp_path / "set"))
    assert source.list().ignored == {"pipes, sockets, devices or circular links": 4}
    rows = everything(source)
    problems = {row.id: row.problem for row in rows}
    assert problems == {
        "blue/one.png": None,
        "blue/two.png": GONE,
        **{f"red/00{index}.png": None for index in (0, 3, 6)},
    }


@pytest.mark.parametrize(
    ("disk", "fix"), [("disk", "mount it again"), (".git/annex/objects/x", "fetch it: git annex get")]
)
@pytest.mark.parametrize("kind", ["red", "tar"])
def test_links_whose_disk_is_gone_are_a_source_that_is_gone(tmp_path, disk, fix, kind):
    write_folder(tmp_path / disk, 9)
    write_tar(tmp_path / disk / "tar", 9)
    (tmp_path / "set/red").mkdir(parents=True)
    for file in (tmp_path / disk / kind).iterdir():
        os.symlink(file, tmp_path / "set/red" / file.name)
    source = open_source(CONFIG, str(tmp_path / "set"))
    shutil.rmtree(tmp_path / disk)
    with pytest.raises(DataError, match=f"links to .*/{disk}/.*, which isn't there any more; {fix}$"):
        everything(source)


def test_a_picture_that_is_gone_is_a_row_with_a_problem(tmp_path):
    write_folder(tmp_path, 9)
    source = open_source(CONFIG, str(tmp_path))
    (unit,) = source.list().units
    (tmp_path / "red" / "000.png").unlink()
    (chunk,) = source.read(unit)
    assert [row.problem for row in chunk.rows if row.id == "red/000.png"] == [GONE]
    assert sum(row.problem is None for row in chunk.rows) == 8


def test_classes_that_are_only_counted_are_the_folders(tmp_path):
    write_folder(tmp_path, 9)
    source = open_source(DataConfig(num_classes=5), str(tmp_path))
    listing = source.list()
    assert source.list() == listing
    assert listing.classes == ("blue", "green", "red")
    planned = source.planned(4, listing.classes)
    for opened, lengths in (
        (source.planned(64, listing.classes), [9]),
        (pickle.loads(pickle.dumps(planned)), [4, 4, 1]),
    ):
        (unit,) = listing.units
        chunks = list(opened.read(unit))
        assert [len(chunk.rows) for chunk in chunks] == lengths
        assert [row.condition for chunk in chunks for row in chunk.rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    (chunk,) = source.read(unit)
    problem = "'blue' is none of the 5 classes; name them: data.class_names=[A, B, ...]"
    assert [row.problem for row in chunk.rows][:1] == [problem]  # of no plan


def test_one_class_needs_no_folders(tmp_path):
    for index in range(3):
        (tmp_path / f"{index}.png").write_bytes(picture(index))
    source = open_source(DataConfig(num_classes=1), str(tmp_path))
    assert [row.condition for row in everything(source)] == [0, 0, 0]
    with pytest.raises(DataError, match="no folders in it; put the images of each of the 3 classes in a folder"):
        open_source(CONFIG, str(tmp_path)).list()


def test_folders_that_are_no_classes(tmp_path):
    write_folder(tmp_path, 9)
    (tmp_path / "stray.png").write_bytes(picture(0))
    message = "class folders that are no class: green; of class_names without a folder: pink; begin a run with"
    with pytest.raises(DataError, match=message):
        open_source(DataConfig(class_names=("red", "blue", "pink")), str(tmp_path)).list()
    config = DataConfig(class_names=("red", "green", "blue"))
    problems = {row.id: row.problem for row in everything(open_source(config, str(tmp_path)))}
    assert problems["stray.png"] == "not in a class's folder"
    assert problems["red/000.png"] is None
    with pytest.raises(DataError, match=r"3 class folders \(blue, green, red\) are more than data.num_classes 2"):
        open_source(DataConfig(num_classes=2), str(tmp_path)).list()
    with pytest.raises(DataError, match="a folder has no captions"):
        open_source(CAPTIONED, str(tmp_path)).list()


def test_a_folder_of_several_kinds(tmp_path):
    write_folder(tmp_path, 3)
    write_tar(tmp_path, 2)
    with pytest.raises(DataError, match=r"3 images and 1 tars; begin a run with data.format=folder or webdataset"):
        open_source(CONFIG, str(tmp_path)).list()
    named = DataConfig(class_names=COLOURS, format="webdataset")
    assert len(everything(open_source(named, str(tmp_path)))) == 2
    with pytest.raises(DataError, match="no parquet files in it"):
        open_source(DataConfig(class_names=COLOURS, format="parquet"), str(tmp_path)).list()


def test_folders_without_pictures(tmp_path):
    with pytest.raises(DataError, match=r"empty: there are no images, tars(,| or) parquet files"):
        open_source(CONFIG, str(tmp_path)).list()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "@eaDir").mkdir()
    (tmp_path / "@eaDir/a.png").write_bytes(picture(0))
    skipped = r"2 files \(1 \.txt, 1 in @eaDir \(a system's\)\), none of them images, tars(,| or) parquet files"
    with pytest.raises(DataError, match=skipped):
        open_source(CONFIG, str(tmp_path)).list()


def test_file_uris_patterns_and_names_that_look_like_patterns(tmp_path):
    odd = tmp_path / "100% {a,b} [1]*"
    write_folder(odd, 6)
    assert len(everything(open_source(CONFIG, str(odd)))) == 6
    assert everything(open_source(CONFIG, odd.as_uri())) == everything(open_source(CONFIG, str(odd)))
    for number in range(3):
        write_tar(tmp_path / "tars" / f"part{number}", 2, "x.tar")
    write_tar(tmp_path / "tars", 2, "top.tar")
    counts = {"tars/**/x.tar": 6, "tars/*.tar": 2, "tars/part{0,2}/x.tar": 4, "tars/part?/*": 6, "tars/top.tar": 2}
    for pattern, count in counts.items():
        assert len(everything(open_source(CONFIG, f"{tmp_path}/{pattern}"))) == count, pattern


def test_a_relative_folder_stays_the_same_elsewhere(tmp_path, monkeypatch):
    write_folder(tmp_path / "set", 3)
    monkeypatch.chdir(tmp_path)
    source = pickle.dumps(open_source(CONFIG, "set"))
    monkeypatch.chdir("/")
    assert len(everything(pickle.loads(source))) == 3


def test_units_are_cheap_to_list_and_say_what_they_read(tmp_path):
    write_folder(tmp_path, 9)
    units = open_source(CONFIG, str(tmp_path), chunk_rows=4).list().units
    assert [unit.key for unit in units] == ["0-4", "4-8", "8-9"]
    assert [len(unit.files) for unit in units] == [4, 4, 1]
    assert all(unit.bytes == sum(unit.sizes) for unit in units)
    tar = write_tar(tmp_path / "tars", 2)
    (unit,) = open_source(CONFIG, str(tar)).list().units
    assert unit == Unit("train-000.tar", tar.stat().st_size, ("train-000.tar",), (tar.stat().st_size,))
