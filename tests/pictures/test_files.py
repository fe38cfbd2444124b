"""Pictures as files: in the format of their ending, whole or not at all, under names that say what they show."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from ddm_ray.cli import main
from ddm_ray.pictures.files import FORMATS, file_name, whole_file, write
from ddm_ray.run.run import Run
from tests.random_run import make_run

PICTURE = Image.fromarray(np.full((8, 8), 90, np.uint8))


@pytest.fixture(scope="module")
def painted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of random weights."""
    return make_run(str(tmp_path_factory.mktemp("random") / "run"))


@pytest.mark.parametrize("ending", [*FORMATS, ".PNG"])
def test_the_ending_decides_the_format(tmp_path: Path, ending: str) -> None:
    write(PICTURE, tmp_path / f"x{ending}")
    with Image.open(tmp_path / f"x{ending}") as image:
        assert image.format == FORMATS[ending.lower()]
        assert abs(np.asarray(image.convert("L")).astype(int) - 90).max() <= 2
    assert [path.name for path in tmp_path.iterdir()] == [f"x{ending}"]


def test_what_cannot_be_written_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    write(PICTURE, tmp_path / "x.jpg")
    before = (tmp_path / "x.jpg").read_bytes()
    with pytest.raises(OSError, match="cannot write mode RGBA as JPEG"):
        write(PICTURE.convert("RGBA"), tmp_path / "x.jpg")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_an_error_names_the_file(tmp_path: Path) -> None:
    def write_text() -> None:
        with whole_file(tmp_path / "x.html") as unfinished:
            unfinished.symlink_to("/dev/full")
            unfinished.write_text("x")

    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/x.html'"):
        write_text()
    assert not (tmp_path / "x.html").exists()


def test_a_link_stays_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text("before")
    (tmp_path / "link.html").symlink_to(tmp_path / "there.html")
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link.html", "pipe"):
        with whole_file(tmp_path / name) as unfinished:
            unfinished.write_text("after")
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "there.html").read_text() == "after"
    assert os.read(reading, 9) == b"after" and (tmp_path / "pipe").is_fifo()
    os.close(reading)


@pytest.mark.parametrize(
    ("shows", "name"),
    [
        ("3", "3-7.png"),
        ("a red cat, sleeping!", "a-red-cat-sleeping-7.png"),
        ("../../etc/passwd", "etc-passwd-7.png"),
        ("猫 и собака", "猫-и-собака-7.png"),
        ("", "7.png"),
        ("*/..", "7.png"),
        ("x" * 300, f"{'x' * 60}-7.png"),
    ],
)
def test_a_name_says_what_is_shown_and_leads_nowhere_else(shows: str, name: str) -> None:
    assert file_name(shows, 7, ".png") == name


def test_sampled_images_have_files_of_their_own(painted: Run, tmp_path: Path) -> None:
    ending = "webp"
    words = ["--class", "1", "--class", "0", "--per-class", "2", "--steps", "1", "--strategy", "once", "--seed", "5"]
    folder = tmp_path / "out"
    done = CliRunner().invoke(main, ["sample", painted.url, *words, "--out-dir", str(folder), "--format", ending])
    assert done.exit_code == 0, done.output
    names = [f"1-5.{ending}", f"1-6.{ending}", f"0-7.{ending}", f"0-8.{ending}"]
    assert {path.name for path in folder.iterdir()} == {*names}
    with Image.open(folder / names[0]) as image:
        assert image.size == (8, 8)
    assert f"{folder}: 4 images, seeds 5 to 8, a file each" in done.output
    assert not Path("samples.png").exists()


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--num", "3"), ["b-0.png", "b-1.png", "c-2.png"]),
        (("--num", "1"), ["b-0.png"]),
        (("--per-class", "1"), ["b-0.png", "c-1.png"]),
    ],
)
def test_num_is_the_number_of_images_and_a_class_has_a_name_or_a_number(
    tmp_path: Path, words: tuple[str, ...], names: list[str]
) -> None:
    run = make_run(str(tmp_path / "run"), settings=("data.class_names=[a, b, c, d, e, f, g, h, i, '0']",), num_rows=60)
    folder = tmp_path / "out"
    asked = ["sample", run.url, "-c", "1", "-c", "c", "--steps", "1", "--strategy", "once", "--out-dir", str(folder)]
    done = CliRunner().invoke(main, [*asked, *words, "-o", str(tmp_path / "all.png")])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in folder.iterdir()) == names
    assert ("they are of the first 1 of 2; use --per-class" in done.output) == (words == ("--num", "1"))
    by_name = CliRunner().invoke(main, ["sample", run.url, "-c", "0", "--num", "1", "--steps", "1", *asked[-2:]])
    assert by_name.exit_code == 0 and (folder / "0-0.png").exists(), "a name comes before a number"
    both = CliRunner().invoke(main, [*asked, "--num", "3", "--per-class", "3"])
    assert both.exit_code == 1 and "--num is the number of images in all" in both.stderr


def test_a_refused_command_leaves_no_folder(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["sample", str(tmp_path / "none"), "--out-dir", str(tmp_path / "out")])
    assert done.exit_code == 1 and not list(tmp_path.iterdir())


def test_a_folder_in_none_is_refused(painted: Run, tmp_path: Path) -> None:
    words = ["sample", painted.url, "--out-dir", str(tmp_path / "no/where")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1 and "No such file or directory; name a folder in one that exists" in done.output


def test_rows_whose_names_no_font_can_write_are_told_one_a_line(tmp_path: Path) -> None:
    names = ["crow", "\ue123", *"23456789"]
    strange = make_run(str(tmp_path / "run"), settings=(f"data.class_names={json.dumps(names)}",))
    words = [
        "sample",
        strange.url,
        "--per-class",
        "1",
        "--steps",
        "1",
        "--strategy",
        "once",
        "-o",
        str(tmp_path / "it.png"),
    ]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    at = lines.index("no font here has all letters; the rows of the picture are:")
    assert lines[at + 1] == "  1: crow" and lines[at + 2].startswith("  2: ")
