"""Commands and programs on the pages of docs/, run as they stand: page by page, in order, in an empty folder.

The folder has `photos/` with two folders of 24 small pictures, `cluster_configs/`, and the run of the demo, which pages
begin from: each repeats its command. Only ports are others, which are free.
"""

import io
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout, suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddm_ray.run.graph import MONOLITH
from ddm_ray.run.run import Run
from tests.conftest import BIN, ROOT, TRAINS, free_island
from tests.page_blocks import PROGRAMS, Block, blocks_of, pages
from tests.pages import same

DEMO = "ddm demo --recipe tiny"
EXECUTED = [page for page in pages() if page not in PROGRAMS and any(block.executed for block in blocks_of(page))]


def executed(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.executed]


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's run, made by its command."""
    folder = tmp_path_factory.mktemp("demo")
    shell(f"{DEMO}\n", folder)
    assert Run.open(str(folder / "runs/tiny")).finished(MONOLITH)
    return folder / "runs/tiny"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a page, in a home of its own; what pages leave running ends with it."""
    generator = np.random.default_rng(0)
    for number in range(24):
        place = tmp_path / "photos" / ("beach", "forest")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (5, 6, 3), np.uint8)
        Image.fromarray(pixels).resize((48, 40), Image.Resampling.BICUBIC).save(place / f"{number:02d}.png")
    (tmp_path / "cluster_configs").symlink_to(ROOT / "cluster_configs")
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    with chdir(tmp_path):
        yield tmp_path
    if (tmp_path / "serve.pid").exists():
        with suppress(ProcessLookupError):
            os.kill(int((tmp_path / "serve.pid").read_text()), signal.SIGTERM)
    if (tmp_path / "home/.ddm/islands").exists():
        subprocess.run(["cluster_configs/local/islands.sh", "down"], cwd=tmp_path, timeout=120, check=False)


def shell(text: str, folder: Path) -> str:
    """Have a shell run a block; what it printed."""
    with (folder / "printed.txt").open("w") as printed:  # not a pipe, which a server would keep open
        running = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **TRAINS, "PATH": f"{BIN}:{os.environ['PATH']}"},
            start_new_session=True,
        )
        try:
            running.wait(1200)
        except BaseException:
            os.killpg(running.pid, signal.SIGKILL)
            raise
    output = (folder / "printed.txt").read_text()
    assert running.returncode == 0, f"{text}\n{output[-4000:]}"
    return output


def with_free_ports(page: str) -> list[Block]:
    """Blocks of a page, with ports that are free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    blocks, islands = executed(page), {}
    if any("islands.sh up 0 1 2" in block.text for block in blocks):
        islands = {"islands.sh up 0 1 2": f"islands.sh up {free_island()} {free_island()} {free_island()}"}
    for place, block in enumerate(blocks):
        text = re.sub(r"(--port |localhost:)8000\b", rf"\g<1>{port}", block.text)
        for written, instead in islands.items():
            text = text.replace(written, instead)
        blocks[place] = Block(block.language, text, block.executed, block.output)
    return blocks


def run_page(page: str, folder: Path) -> None:
    namespace: dict[str, object] = {}
    for block in with_free_ports(page):
        if block.language == "sh":
            shell(block.text, folder)
            continue
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(block.text, page, "exec"), namespace)
        if block.output and "..." not in re.split(r"\s", block.output):
            assert same(block.output, printed.getvalue()), f"shown:\n{block.output}\nprinted:\n{printed.getvalue()}"


@pytest.mark.chaos
@pytest.mark.parametrize("page", EXECUTED)
def test_a_page(page: str, folder: Path, request: pytest.FixtureRequest) -> None:
    if any(DEMO in block.text for block in executed(page)):
        shutil.copytree(request.getfixturevalue("demo_run"), folder / "runs/tiny")
    run_page(page, folder)


def test_a_page_that_shows_something_else_would_be_found() -> None:
    assert same("(1, 1, 8, 8) torch.float32", "(1, 1, 8, 8) torch.float32")
    assert not same("(1, 1, 8, 8) torch.float32", "(1, 3, 8, 8) torch.float32")


def test_pages_are_executed() -> None:
    assert len(EXECUTED) > 20
    assert not [page for page in EXECUTED if not page.startswith(("start/", "howto/", "concepts/", "reference/"))]
