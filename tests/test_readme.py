"""The README's blocks, run as they stand; a few steps in place of thousands."""

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from sklearn.datasets import load_sample_images

from ddm_ray.cli import main
from ddm_ray.placement import Island
from ddm_ray.run.graph import ROUTER
from ddm_ray.run.run import Run
from tests.conftest import BIN, answers, end, wait_for
from tests.readme import README, blocks_of

pytestmark = pytest.mark.integration

SHORT = (
    "expert.train.steps=4",
    "expert.train.warmup_steps=0",
    "router.train.steps=4",
    "router.train.warmup_steps=0",
    "expert.model.depth=1",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with crops of two real photographs in ~/photos, to stand in."""
    generator = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(120):
        image = load_sample_images().images[number % 2]
        side = int(generator.integers(60, 240))
        top, left = (int(generator.integers(0, length - side)) for length in image.shape[:2])
        crop = Image.fromarray(image[top : top + side, left : left + side])
        crop.save(tmp_path / f"photos/{number:03d}.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_photographs_of_ones_own_up_to_a_served_image(ray_cluster: str, home: Path) -> None:
    ((activate, *commands),) = blocks_of("Your own photographs")
    assert activate == ". .venv/bin/activate"
    printed = []
    for command in commands:
        _, *arguments = shlex.split(command, comments=True)
        if arguments[0] == "init":
            arguments += [part for setting in SHORT for part in ("--set", setting)]
        if arguments[0] == "plan":  # its trial steps would be this process's only world of ranks
            words = [sys.executable, str(BIN / "ddm"), *arguments]
            planned = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
            assert planned.returncode == 0, planned.stderr[-3000:]
            continue
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, f"{command}\n{done.output[-3000:]}"
        printed.append(done.output)
    assert f"{home}/photos: 120 .jpg" in printed[0] and "next: ddm prepare runs/photos" in printed[0]
    run = Run.open("runs/photos")
    assert all(run.finished(artifact) for artifact in (*run.experts, ROUTER))
    assert run.config.data.source == f"{home}/photos" and run.config.data.horizontal_flips
    with Image.open("mine.png") as grid:
        assert grid.width > 4 * run.config.data.image_size
    check_python()
    check_serving()


def check_python() -> None:
    """The block of Python, with the run that is there."""
    (lines,) = blocks_of("Python")
    exec("\n".join(lines), {})
    with Image.open("four.png") as picture:
        assert picture.width > 4 * 32
    assert Path("experts.png").stat().st_size > 1000


def check_serving() -> None:
    """The server's command, and the request that is sent to it, at a port that is free."""
    ((serve, ask),) = blocks_of("Serving")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [sys.executable, str(BIN / "ddm"), *shlex.split(serve.replace("8000", port))[1:]]
    with Path("serve.log").open("wb") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/readyz"), 120, Path("serve.log").read_text)
        subprocess.run(ask.replace("8000", port), shell=True, check=True)
    finally:
        end(server)
    with Image.open("one.png") as image:
        assert image.size == (256, 256)


def test_several_machines_by_words_that_ddm_knows() -> None:
    """docs/howto/machines.md has the same commands run on islands of one machine."""
    lines = [line for block in blocks_of("Several machines") for line in block]
    assert [line.split()[1] for line in lines] == ["init", "prepare", "partition", "work"]
    for line in lines:
        _, verb, *words = shlex.split(line)
        given = main.commands[verb].make_context(verb, words).params
        assert given["run_url"] == "s3://lab/faces"
    assert Island.from_json("north", given["placement"]).train.use_gpu


def test_a_screen_and_a_half() -> None:
    text = README.read_text()
    assert len(text.encode()) <= 8000 and text.count("\n") <= 150
    lengths = [len(line) for line in text.splitlines() if not line.startswith(("|", "!["))]
    assert max(lengths) <= 120
