"""Bombs of memory and time among good images: each is one row or its reason, and a task stays small."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddm_ray.config import DataConfig
from ddm_ray.data.prepare import decoder
from ddm_ray.data.sources import open_source
from tests.conftest import ROOT
from tests.data.bombs import FEW, MORE, good_images, write_parquet, write_tar

pytestmark = pytest.mark.contract

CONFIG = DataConfig(num_classes=4, channels=3, image_size=16)
SMALL = {name: FEW[name] for name in ("alpha.png", "tiles.j2k", "scans.jpg")}
MADE = ("palette.png", "alpha.png", "tiles.tif", "deep.png", "grey16.png", "fewer-scans.jpg", "frame.gif")
"""Bombs that are within the budgets after all."""


def taken(source: Path) -> dict[str, Any]:
    """Outcomes of a source's rows, and what a task took for them."""
    command = [sys.executable, "-m", "tests.data.bombs", str(source), str(CONFIG.image_size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    made: dict[str, Any] = json.loads(done.stdout)
    # The process that decodes for it can't have more.
    assert made["peak"] + decoder.MEMORY + 2**26 < 2**30
    return made


def test_bombs_in_a_tar_among_good_images(tmp_path: Path, every: bool) -> None:
    bombs = {name: make() for name, make in ({**FEW, **MORE} if every else SMALL).items()}
    bombs = {f"{number}.{name.partition('.')[2]}": bomb for number, (name, bomb) in enumerate(bombs.items())}
    names = dict(zip([name.partition(".")[0] for name in bombs], FEW | MORE if every else SMALL, strict=True))
    good = good_images(1000 if every else 30)
    reasons = write_tar(tmp_path / "x.tar", good, bombs)
    made = taken(tmp_path)
    outcomes = {row.removeprefix("x.tar/"): reason for row, reason in made["outcomes"].items()}
    usable = {row for row, reason in outcomes.items() if not reason}
    assert usable == {f"good-{number:04d}" for number in range(len(good))} | {
        f"bomb-{number}" for number, name in names.items() if name in MADE
    }
    assert outcomes.keys() - usable == reasons.keys() | {
        f"bomb-{number}" for number, name in names.items() if name not in MADE
    }
    assert [row for row, begins in reasons.items() if not outcomes[row].startswith(begins)] == []
    # A large image that fails does so twice, and starts two processes.
    assert made["cpu"] < 2 * len(bombs) * (decoder.SECONDS + 1)


def test_a_dictionary_of_parquet_is_no_chunk_of_gigabytes(tmp_path: Path, every: bool) -> None:
    rows = 4096 if every else 256
    write_parquet(tmp_path / "x.parquet", rows, good_images(1)[0])
    assert (tmp_path / "x.parquet").stat().st_size < 1.1 * 2**20
    made = taken(tmp_path)
    assert list(made["outcomes"].values()) == [""] * rows
    assert len(made["chunk_rows"]) == -(-rows // 192) and max(made["chunk_rows"]) == 192
    source = open_source(CONFIG, str(tmp_path))
    (unit,) = source.list().units
    (last,) = source.read(unit, set(range(len(made["chunk_rows"]) - 1)))
    assert (last.rows[-1].id, len(last.rows)) == (f"x.parquet/{rows - 1:08d}", made["chunk_rows"][-1])
