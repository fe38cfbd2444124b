"""Folders that systems create, and folders of runs, hold no images of a source; what is skipped is counted."""

import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.config import DataConfig, load_recipe
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.sharded.serial import serial
from ddm_ray.data.sources import open_source
from ddm_ray.data.sources.files import Files
from ddm_ray.data.sources.skipped import unread
from ddm_ray.errors import DataError
from ddm_ray.run.graph import ROWS
from ddm_ray.run.run import Run
from tests.data.s3 import s3_server, upload
from tests.data.sources.test_sources import everything, picture

CONFIG = DataConfig(num_classes=2)
SYSTEMS = ["@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found", "__MACOSX", "@Recycle"]
SYSTEMS += ["@tmp", "@appstore", "FOUND.001", "RECYCLED"]


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(picture(0))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two class folders, each with what systems leave there, and a run with images of its own."""
    folder = tmp_path / "photos"
    for name in ("cats", "dogs"):
        write(folder, f"{name}/a.png", f"{name}/b.png", f"{name}/Thumbs.db", f"{name}/.b.png.swp")
        write(folder, *(f"{name}/{system}/deep/a.png" for system in SYSTEMS))
    Run.create(str(folder / "runs/one"), load_recipe("tiny"))
    write(folder, "runs/one/rows/x.png", "runs/one/y.parquet")
    (folder / "dogs/run.json").write_text('{"results": [1, 2]}')  # somebody else's
    return folder


COUNTS = {f"in {system} (a system's)": 2 for system in SYSTEMS} | {"hidden": 4, "in one (a run)": 3, ".json": 1}


def test_a_folder_is_read_without_them(photos: Path) -> None:
    source = open_source(CONFIG, str(photos))
    assert sorted(row.id for row in everything(source)) == ["cats/a.png", "cats/b.png", "dogs/a.png", "dogs/b.png"]
    listing = source.list()
    assert listing.ignored == COUNTS and listing.classes == ("cats", "dogs")
    assert sum(COUNTS.values()) + 4 == sum(path.is_file() for path in photos.rglob("*"))


@pytest.mark.contract
def test_so_is_a_bucket(photos: Path, tmp_path: Path) -> None:
    with s3_server(tmp_path / "log"):
        source = open_source(CONFIG, upload(photos, "photos"))
        assert sorted(row.id for row in everything(source)) == ["cats/a.png", "cats/b.png", "dogs/a.png", "dogs/b.png"]
        expected = {key.replace("in one", "in runs/one"): count for key, count in COUNTS.items()}
        assert source.list().ignored == expected
        with pytest.raises(DataError, match=r"/runs/one' is a run; give the folder of its images$"):
            open_source(CONFIG, f"{source.files.url}/runs/one").list()


@pytest.mark.contract
def test_patterns_skip_alike_on_a_disk_and_in_a_bucket(photos: Path, tmp_path: Path) -> None:
    """A bucket's folder counts as one, and one that no pattern leads into isn't looked at."""
    write(photos, "cats/.cache/a.png", "cats/.cache/b.png")
    with s3_server(tmp_path / "log"):
        for root in (str(photos), upload(photos, "patterns")):
            run, beside, cache = (1, 0, 1) if "://" in root else (3, 3, 2)
            dogs = len(SYSTEMS) + 2
            cats = dogs + cache
            counts = {"runs/*/rows/*.png": run, "cats/*": cats, "cats/*.png": cats, "*/*.png": cats + dogs + beside}
            counts["runs/*/rows/{x,y}*.png"] = run
            for pattern, count in counts.items():
                skipped = Counter[str]()
                with suppress(DataError):
                    Files(f"{root}/{pattern}").sizes(skipped)
                assert (pattern, sum(skipped.values())) == (pattern, count)


def test_who_names_such_a_folder_gets_it(photos: Path) -> None:
    source = open_source(DataConfig(num_classes=1), f"{photos}/cats/@eaDir/deep/*.png")
    assert len(everything(source)) == 1


def test_a_run_is_no_source(photos: Path) -> None:
    with pytest.raises(DataError, match=r"/runs/one' is a run; give the folder of its images$"):
        open_source(CONFIG, f"{photos}/runs/one").list()


@pytest.mark.contract
def test_a_run_in_the_folder_of_its_own_images(photos: Path) -> None:
    """Its rows and pictures are no images: neither for a second look at them nor for those that are appended later."""
    shutil.rmtree(photos / "runs")
    settings = [f"data.source={photos}", "data.num_classes=2", "data.channels=3", "embedder.dim=2"]
    settings += ["partition.num_clusters=2", "data.heldout=0", "partition.num_fine=2"]
    words = [part for setting in settings for part in ("--set", setting)]
    url = str(photos / "runs/mine")
    for _ in range(2):
        done = CliRunner().invoke(main, ["init", url, "--recipe", "tiny", *words])
        assert done.exit_code == 0 and f"{photos}: 4 .png, " in done.output, done.output
    run = Run.open(url)
    prepare(run, execute=serial)
    assert run.require(ROWS).info["rows"] == 4
    write(photos, "runs/mine/eval/grid.png", "runs/mine/pictures/x.parquet")
    again = CliRunner().invoke(main, ["init", str(photos / "runs/second"), "--recipe", "tiny", *words])
    assert again.exit_code == 0 and f"{photos}: 4 .png, " in again.output, again.output
    assert " in mine (a run)" in again.output and " in second (a run)" not in again.output


def test_files_that_only_hide_are_said_and_others_are_a_warning() -> None:
    assert unread({}) == ([], [])
    assert unread({"hidden": 2}) == (["2 files aren't read: 2 hidden"], [])
    convert = "; convert the photographs (.heic) to JPEG or PNG first"
    assert unread({"hidden": 1, ".heic": 3}) == ([], [f"4 files aren't read: 3 .heic, 1 hidden{convert}"])
