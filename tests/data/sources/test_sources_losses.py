"""What isn't read is said: a source that is gone, files of other kinds, odd names; and how much is read at once."""

import os
import shutil
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from ddm_ray.config import DataConfig
from ddm_ray.data.images import decode
from ddm_ray.data.sources import Source, chunks, open_source, webdataset
from ddm_ray.errors import DataError
from tests.data.s3 import BUCKET, s3, s3_server
from tests.data.sources.test_sources import (
    CAPTIONED,
    CONFIG,
    everything,
    picture,
    tar_of,
    write_folder,
    write_parquet,
    write_tar,
)

pytestmark = pytest.mark.contract

LOST = r"isn't there any more; (mount it again|put it back), then the same command goes on"
ANY = DataConfig(num_classes=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as url:
        yield url


def problems(source: Source) -> dict[str, str | None]:
    return {row.id: row.problem for row in everything(source)}


@pytest.mark.parametrize("write", [write_folder, write_tar, write_parquet])
@pytest.mark.parametrize("empty", [False, True], ids=["no mount point", "an empty mount point"])
def test_a_disk_that_is_gone_is_no_loss_of_its_images(tmp_path, write, empty):
    write(tmp_path / "disk", 9)
    source = open_source(CONFIG, str(tmp_path / "disk"), chunk_rows=1)
    units = source.list().units
    shutil.rmtree(tmp_path / "disk")
    if empty:
        (tmp_path / "disk").mkdir()
    for unit in units:
        with pytest.raises(DataError, match=LOST) as error:
            list(source.read(unit))
        assert "\n" not in str(error.value)


def test_an_emptied_class_folder_and_most_of_the_files_being_gone_are_no_loss_either(tmp_path):
    write_folder(tmp_path, 30)
    source = open_source(CONFIG, str(tmp_path))
    (unit,) = source.list().units
    for number in range(0, 27, 3):
        (tmp_path / "red" / f"{number:03d}.png").unlink()
    assert sum(row.problem is not None for row in next(iter(source.read(unit))).rows) == 9
    (tmp_path / "red" / "027.png").unlink()
    with pytest.raises(DataError, match=f"{tmp_path}/red: {LOST}"):
        list(source.read(unit))
    (tmp_path / "red" / "other.png").write_bytes(picture(0))
    for colour in ("green", "blue"):
        for path in list((tmp_path / colour).iterdir())[1:7]:
            path.unlink()
    with pytest.raises(DataError, match=f"and 21 of the 29 files next to it: {LOST}"):
        list(source.read(unit))


@pytest.mark.parametrize("place", [f"{BUCKET}/lost", "emptied"], ids=["prefix", "bucket"])
def test_a_prefix_or_bucket_that_is_empty_by_now_is_no_loss_of_its_images(server, tmp_path, place):
    write_folder(tmp_path, 3)
    s3().create_dir(place)
    fs.copy_files(str(tmp_path), place, destination_filesystem=s3())
    source = open_source(CONFIG, f"s3://{place}", chunk_rows=1)
    units = source.list().units
    s3().delete_dir_contents(place)
    if "/" in place:
        s3().delete_dir(place)
    for unit in units:
        with pytest.raises(DataError, match=f"s3://{place}: {LOST}"):
            list(source.read(unit))


def test_an_image_that_changed_is_a_row_with_a_problem(tmp_path):
    write_folder(tmp_path, 9)
    source = open_source(CONFIG, str(tmp_path))
    (unit,) = source.list().units
    for name, content in (("000", picture(0) + b"\0"), ("003", picture(0)[:-1]), ("006", b"")):
        (tmp_path / "red" / f"{name}.png").write_bytes(content)
    (chunk,) = source.read(unit)
    unusable = [(row.id, row.image, row.problem) for row in chunk.rows if row.problem]
    assert unusable == [(f"red/00{index}.png", None, "changed since it was listed") for index in (0, 3, 6)]


def test_files_of_other_kinds_are_counted(tmp_path):
    write_tar(tmp_path, 5)
    (tmp_path / "README.md").write_text("of no interest")
    source = open_source(CONFIG, str(tmp_path))
    for number in range(23):
        (tmp_path / f"{number}.{'HEIC' if number < 11 else number}").touch()
    (tmp_path / "LICENSE").touch()
    ignored = source.list().ignored
    assert list(ignored.items())[:3] == [(".heic", 11), (".11", 1), (".12", 1)]
    assert (sum(ignored.values()), ignored["of other endings"]) == (25, 6)
    assert open_source(CONFIG, "digits").list().ignored == open_source(CONFIG, "shapes:9").list().ignored == {}


@pytest.mark.parametrize("write", [write_folder, write_tar, write_parquet])
def test_a_chunk_ends_where_its_files_are_large(tmp_path, monkeypatch, write):
    write(tmp_path, 45)
    few = [
        len(chunk.rows)
        for source in [open_source(CONFIG, str(tmp_path))]
        for chunk in source.read(*source.list().units)
    ]
    assert few == [45]
    complete = everything(open_source(CONFIG, str(tmp_path)))
    most = 5 * max(len(row.image) for row in complete)
    monkeypatch.setattr(chunks, "CHUNK_FILE_BYTES", most)
    source = open_source(CONFIG, str(tmp_path))
    assert everything(source) == complete
    units = source.list().units
    for unit in units:
        made = list(source.read(unit))
        assert len(units) > 5 or len(made) > 5
        for chunk in made:
            # With the last row it may be more.
            assert 1 <= len(chunk.rows) <= 6 and sum(len(row.image) for row in chunk.rows[:-1]) < most
        for skip in ({0}, {len(made) - 1}, {1, 3}, set(range(len(made) - 1))):
            assert list(source.read(unit, skip)) == [chunk for chunk in made if chunk.number not in skip]


def test_members_of_no_use_are_not_read(tmp_path, monkeypatch):
    path = tar_of(
        tmp_path / "x.tar",
        ("a.png", picture(0)),
        ("a.cls", b"1"),
        ("a.json", b"{}"),
        ("a.mp4", b"film"),
        ("b", b"text"),
    )
    opened = []
    extract = tarfile.TarFile.extractfile
    monkeypatch.setattr(tarfile.TarFile, "extractfile", lambda tar, at: opened.append(at.name) or extract(tar, at))
    assert problems(open_source(CONFIG, str(path))) == {"x.tar/a": None, "x.tar/b": "no image among "}
    assert opened == ["a.png", "a.cls", "a.json"]
    opened.clear()
    everything(open_source(ANY, str(path)))
    assert opened == ["a.png"]


def test_captions_that_no_row_can_have(tmp_path):
    members = (
        ("a.txt", b"x" * 70_000),
        ("b.png", picture(0)),
        ("c.png", picture(0)),
        ("c.json", b'{"text": "\\ud83d"}'),
    )
    path = tar_of(tmp_path / "x.tar", ("a.png", picture(0)), *members)
    assert problems(open_source(CAPTIONED, str(path))) == {
        "x.tar/a": "caption has 70000 letters, more than 65536",
        "x.tar/b": "no caption",
        "x.tar/c": "caption is not UTF-8",
    }


def test_members_of_more_bytes_than_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(webdataset, "IMAGE_BYTES", 3_000)
    monkeypatch.setattr(webdataset, "STATED_BYTES", 100)
    names = ("a.png", "a.mp4", "b.txt", "b.png", "c.png", "c.jpg", "d.bin", "e.png")
    path = tar_of(tmp_path / "x.tar", *((name, bytes(3_001 if name == "e.png" else 2_000)) for name in names))
    assert problems(open_source(ANY, str(path))) == {
        "x.tar/a": None,
        "x.tar/b": None,
        "x.tar/c.png": "its members have more than 3000 bytes",
        "x.tar/c.jpg": "its members have more than 3000 bytes",
        "x.tar/d": "no image among bin",
        "x.tar/e": "its png has 3001 bytes, more than 3000",
    }
    chosen = DataConfig(num_classes=1, image_column="BIN")
    assert problems(open_source(chosen, str(path)))["x.tar/d"] is None
    assert problems(open_source(CAPTIONED, str(path)))["x.tar/b"] == "its txt has 2000 bytes, more than 100"


def test_an_image_of_more_bytes_than_are_read(tmp_path):
    write_folder(tmp_path, 3)
    (tmp_path / "red" / "huge.png").touch()
    os.truncate(tmp_path / "red" / "huge.png", chunks.IMAGE_BYTES + 1)
    problem_by_id = problems(open_source(CONFIG, str(tmp_path)))
    assert problem_by_id.pop("red/huge.png") == "has 268435457 bytes, more than 268435456"
    assert set(problem_by_id.values()) == {None} and len(problem_by_id) == 3


def test_values_end_a_chunk_of_parquet_where_the_footer_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_FILE_BYTES", 8_000)
    image = picture(0) + bytes(1_000)
    table = pa.table({"image": [image] * 90, "label": [1] * 90})
    ends = {}
    for kind, dictionary in (("once", ["image"]), ("each", False)):
        (tmp_path / kind).mkdir()
        pq.write_table(table, tmp_path / kind / "x.parquet", row_group_size=30, use_dictionary=dictionary)
        source = open_source(CONFIG, str(tmp_path / kind))
        (unit,) = source.list().units
        made = list(source.read(unit))
        ends[kind] = [len(chunk.rows) for chunk in made]
        assert [row.image for chunk in made for row in chunk.rows] == [image] * 90
        for skip in ({0}, set(range(len(made) - 1)), {1, 2, 3, 4, 5}):
            assert list(source.read(unit, skip)) == [chunk for chunk in made if chunk.number not in skip]
    full = -(-12_000 // len(image))
    assert ends["once"] == [full] * (90 // full) + [90 % full]
    # An honest footer's chunks are those that it says.
    assert len(ends["each"]) > 10 and max(ends["each"]) < full


def test_names_that_are_not_utf_8(tmp_path):
    write_folder(tmp_path, 3)
    with open(os.fsencode(tmp_path) + b"/red/caf\xe9.png", "wb") as file:
        file.write(picture(0))
    (tmp_path / "red" / "caf\\xe8.png").write_bytes(picture(1))
    problem_by_id = problems(open_source(CONFIG, str(tmp_path)))
    assert all(row_id.encode() for row_id in problem_by_id)
    assert problem_by_id.pop("red/caf\\xe9.png") == "its name is not UTF-8; rename it"
    assert set(problem_by_id.values()) == {None} and len(problem_by_id) == 4
    os.rename(write_tar(tmp_path / "tars", 2), os.fsencode(tmp_path) + b"/tars/\xff.tar")
    with pytest.raises(DataError, match=r"/tars/\\xff.tar: its name is not UTF-8; rename it"):
        everything(open_source(CONFIG, f"{tmp_path}/tars"))


def test_a_pattern_walks_no_deeper_than_it_says(tmp_path, monkeypatch):
    for name in ("a/1.tar", "a/deep/2.tar", "b/3.tar", "4.tar", "[5]*.tar", "[5]6.tar"):
        write_tar(tmp_path, 1, name)
    scanned = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scanned.append(os.path.relpath(path, tmp_path)) or scan(path))
    for pattern, expected, walked in [
        ("4.tar", ["4.tar"], []),
        ("a/{1,deep/2}.tar", ["1.tar", "deep/2.tar"], []),
        ("[5]*.tar", ["[5]*.tar"], []),
        ("?.tar", ["4.tar"], ["."]),
        ("*/[0-9].tar", None, [".", "a", "b"]),
        ("*/?.tar", ["a/1.tar", "b/3.tar"], [".", "a", "b"]),
        ("{a,b,c}/*", ["a/1.tar", "b/3.tar"], ["a", "b"]),
        ("a/**/?.tar", ["1.tar", "deep/2.tar"], ["a", "a/deep"]),
        ("*/deep/*.tar", ["a/deep/2.tar"], [".", "a/deep"]),
    ]:
        scanned.clear()
        source = open_source(CONFIG, f"{tmp_path}/{pattern}")
        if expected is None:
            with pytest.raises(DataError, match="no file there matches"):
                source.list()
        else:
            assert [unit.key for unit in source.list().units] == expected, pattern
        assert sorted(scanned) == walked, pattern


@pytest.mark.parametrize("name", ["red/a.png", "a.tar", "a.parquet"])
def test_a_pointer_of_lfs_is_called_so(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    message = "a pointer of Git LFS, not the file itself; fetch it: git lfs pull"
    if name.endswith("png"):
        (row,) = everything(open_source(CONFIG, str(tmp_path)))
        with pytest.raises(ValueError, match=message):
            decode(row.image, (3, 8, 8))
    else:
        with pytest.raises(DataError, match=message):
            everything(open_source(CONFIG, str(tmp_path)))
