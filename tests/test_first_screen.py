"""The README's first commands, on photographs of one's own, run as they stand; a few steps in place of thousands."""

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
from ddm_ray.run.graph import ROUTER
from ddm_ray.run.run import Run
from tests.conftest import BIN, ROOT, answers, end, wait_for
from tests.readme import commands_of

pytestmark = pytest.mark.integration

SHORT = (
    "expert.train.steps=4",
    "expert.train.warmup_steps=0",
    "router.train.steps=4",
    "router.train.warmup_steps=0",
    "expert.model.depth=1",
)
TITLE = "Your own photographs"


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
    activate, *commands, serve = (command.partition("  #")[0].strip() for command in commands_of(TITLE)[0])
    assert activate == ". .venv/bin/activate"
    printed = []
    for command in commands:
        _, *arguments = shlex.split(command)
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

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, str(BIN / "ddm"), *shlex.split(serve.replace("8000", str(port)))[1:]]
    with Path("serve.log").open("wb") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/readyz"), 120, Path("serve.log").read_text)
        asked = [sys.executable, str(ROOT / "serving/client.py"), "0", "--out", "served.png"]
        subprocess.run([*asked, "--url", f"http://127.0.0.1:{port}"], check=True)
    finally:
        end(server)
    with Image.open("served.png") as image:
        assert image.size == (32, 32)
