"""Tars as people make them: with what systems leave in folders, with links, joined by cat, compressed."""

import gzip
import io
import lzma
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from ddm_ray.config import DataConfig
from ddm_ray.data.prepare.decoding import decode_rows
from ddm_ray.data.sources import Encoded, open_source
from ddm_ray.data.sources.webdataset import JOINED, LINK
from ddm_ray.errors import DataError
from tests.data.sources.test_sources import CONFIG, everything, picture, tar_of, write_tar

ANY = DataConfig(num_classes=1)
IMAGE = picture(0)
SYSTEMS = ("p/@eaDir/0.png/THUMB.jpg", "p/@eaDir/1.png/THUMB.jpg", "p/#recycle/a.png", "__MACOSX/p/._0.png")
HIDDEN = ("p/._0.png", "./p/.b.png")
COUNTED = "of its tar, 6 files aren't read: 2 in @eaDir (a system's), 2 hidden, 1 in #recycle (a "


def rows_of(folder: Path, *names: str, config: DataConfig = ANY) -> list[Encoded]:
    tar_of(folder / "x.tar", *((name, IMAGE) for name in names))
    return everything(open_source(config, str(folder)))


@pytest.mark.contract
@pytest.mark.parametrize("others_first", [True, False])
def test_pictures_that_systems_and_programs_leave_are_counted(tmp_path: Path, others_first: bool) -> None:
    others, own = (*SYSTEMS, *HIDDEN), ("./p/.cache/0.png", "../p/1.png")
    rows = rows_of(tmp_path, *(others + own if others_first else own + others))
    assert [row.id for row in rows] == ["x.tar/p/.cache/0", "x.tar/../p/1"]
    assert rows[0].remark is None and (rows[1].remark or "").startswith(COUNTED)
    decoded = decode_rows(rows, ANY)
    assert decoded.ids == [row.id for row in rows] and not decoded.rejected
    assert decoded.losses == [{"id": rows[1].id, "reason": rows[1].remark}]


def test_a_tar_of_nothing_else_says_so(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, *SYSTEMS, *HIDDEN)
    assert row.id == "x.tar/….skipped" and (row.problem or "").startswith(COUNTED)


def test_names_that_differ_in_case_alone(tmp_path: Path) -> None:
    problem = "several images differ in case alone: JPG, jpg; rename all but one"
    rows = rows_of(tmp_path, "1.JPG", "1.jpg")
    assert [(row.id, row.problem) for row in rows] == [("x.tar/1.JPG", problem), ("x.tar/1.jpg", problem)]
    tar_of(tmp_path / "x.tar", ("1.CLS", b"1"), ("1.JPG", IMAGE))
    assert everything(open_source(CONFIG, str(tmp_path))) == [Encoded("x.tar/1", IMAGE, 1)]


def test_a_key_ends_at_the_first_dot(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, "a.edited.png")
    assert row.problem == (
        "no image among edited.png; a key ends at the first dot of a name: data.image_column=edited.png chooses one"
    )
    chosen = DataConfig(num_classes=1, image_column="edited.png")
    assert rows_of(tmp_path, "a.edited.png", config=chosen) == [Encoded("x.tar/a", IMAGE, 0)]


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE], ids=["hard", "soft"])
@pytest.mark.parametrize("ending", ["png", "cls"])
def test_a_link_is_named(tmp_path: Path, kind: bytes, ending: str) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, content in (("0.png", IMAGE), ("0.cls", b"1"), ("1.png", IMAGE), ("1.cls", b"1"), ("1.mp4", b"")):
            header = tarfile.TarInfo(name)
            header.size = len(content)
            if name in (f"1.{ending}", "1.mp4"):
                header.type, header.linkname, header.size = kind, f"0.{ending}", 0
            tar.addfile(header, io.BytesIO(content))
    rows = everything(open_source(CONFIG, str(tmp_path)))
    assert [(row.id, row.problem) for row in rows] == [("x.tar/0", None), ("x.tar/1", f"its {ending} is {LINK}")]


@pytest.mark.parametrize(("packer", "pack"), [("gzip", gzip.compress), ("xz", lzma.compress)])
def test_a_compressed_tar_is_named(tmp_path: Path, packer: str, pack) -> None:
    path = write_tar(tmp_path, 9)
    path.write_bytes(pack(path.read_bytes()))
    with pytest.raises(DataError, match=f"{path}: is compressed by {packer}, not a tar; unpack it by {packer} -d"):
        everything(open_source(CONFIG, str(tmp_path)))


@pytest.mark.parametrize("padding", [1024, 9 * 512, 10240])
def test_tars_that_cat_joined(tmp_path: Path, padding: int) -> None:
    one = write_tar(tmp_path, 20)
    content = one.read_bytes()
    one.write_bytes(content.rstrip(b"\0").ljust(-(-len(content.rstrip(b"\0")) // 512) * 512 + padding, b"\0") + content)
    with pytest.raises(DataError) as refused:
        everything(open_source(CONFIG, str(tmp_path)))
    assert str(refused.value) == f"{one}: {JOINED}"


@pytest.mark.contract
def test_the_commands_that_are_named_make_tars_that_can_be_read(tmp_path: Path) -> None:
    for name in "AB":
        (tmp_path / "FOLDER").mkdir(exist_ok=True)
        (tmp_path / f"FOLDER/{name}.png").write_bytes(IMAGE)
        (tmp_path / f"FOLDER/{name}1.png").symlink_to(f"{name}.png")
        (tmp_path / f"FOLDER/{name}2.png").hardlink_to(tmp_path / f"FOLDER/{name}.png")
        subprocess.run(LINK.split("`")[1], shell=True, check=True, cwd=tmp_path)
        subprocess.run(["tar", "-cf", f"{name}.tar", "COPY"], check=True, cwd=tmp_path)
        shutil.rmtree(tmp_path / "FOLDER")
        shutil.rmtree(tmp_path / "COPY")
    subprocess.run(JOINED.split("`")[-2], shell=True, check=True, cwd=tmp_path)
    rows = everything(open_source(ANY, str(tmp_path / "A.tar")))
    assert sorted(row.id for row in rows if row.problem is None) == [
        f"A.tar/COPY/{name}" for name in ("A", "A1", "A2", "B", "B1", "B2")
    ]
