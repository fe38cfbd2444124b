"""Hundreds of odd files in one folder: each is read as it looks, left out with a reason, or counted as skipped."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ddm_ray.config import load_recipe
from ddm_ray.data.prepare.records import REJECTED
from ddm_ray.data.prepare.stage import prepare
from ddm_ray.data.schema import images
from ddm_ray.data.sharded.serial import serial
from ddm_ray.run.graph import ROWS
from ddm_ray.run.run import Run
from tests.data.odd_files import KINDS, PAGE, Kind, page
from tests.data.odd_pictures import OddFile
from tests.data.rows import read_artifact

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def files() -> dict[str, tuple[Kind, OddFile]]:
    """All odd files by their paths: each kind in a folder of its own."""
    named: dict[str, tuple[Kind, OddFile]] = {}
    for number, kind in enumerate(KINDS):
        for file in kind.files():
            name = f"{number:02d}/{file.name}"
            assert name not in named
            named[name] = (kind, file)
    return named


@pytest.fixture(scope="module")
def run(files: dict[str, tuple[Kind, OddFile]], tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("odd")
    for name, (_, file) in files.items():
        (folder / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "photos" / name).write_bytes(file.data)
    settings = (f"data.source={folder}/photos", "data.num_classes=1", "data.channels=3", "embedder.dim=3")
    made = Run.create(str(folder / "run"), load_recipe("tiny", settings))
    prepare(made, execute=serial, max_rejected=0.5)
    return made


def test_all_files_are_accounted_for(files: dict[str, tuple[Kind, OddFile]], run: Run) -> None:
    info = run.require(ROWS).info
    assert len(files) > 300
    assert info["rows"] + info["rejected"] + sum(info["ignored"].values()) == len(files)


def test_what_is_read_looks_as_it_is(files: dict[str, tuple[Kind, OddFile]], run: Run) -> None:
    table = read_artifact(run, ROWS)
    wrong, levels_NCHW = list[str](), (images(table, run.config.data) + 1) * 127.5
    for name, pixels_CHW in zip(table["id"].to_pylist(), levels_NCHW, strict=True):
        _, file = files[name]
        if np.abs(pixels_CHW.mean(axis=(1, 2)) - file.colour).max() > file.within:
            wrong.append(f"{name}: {pixels_CHW.mean(axis=(1, 2))}, not {file.colour}")
    assert not wrong, "\n".join(wrong)
    expected = {name for name, (kind, _) in files.items() if kind.outcome == "read"}
    assert set(table["id"].to_pylist()) == expected


def test_what_is_left_out_has_its_reason(files: dict[str, tuple[Kind, OddFile]], run: Run) -> None:
    stored = run.store.sizes(f"{ROWS}/{REJECTED}")
    entries = [entry for name in stored for entry in json.loads(run.store.read(f"{ROWS}/{REJECTED}/{name}"))]
    reasons = {entry["id"]: entry["reason"] for entry in entries}
    assert reasons.keys() == {name for name, (kind, _) in files.items() if kind.outcome == "left out"}
    for name, reason in reasons.items():
        assert reason.startswith(files[name][0].says) and "\n" not in reason and " at 0x" not in reason, (name, reason)


def test_what_is_skipped_is_counted(files: dict[str, tuple[Kind, OddFile]], run: Run) -> None:
    expected = Counter(kind.says for kind, _ in files.values() if kind.outcome == "skipped")
    ignored: Counter[str] = Counter()
    for words, count in run.require(ROWS).info["ignored"].items():
        of_endings = words.startswith(".") or words == "of other endings"
        ignored["." if of_endings else next(says for says in expected if words.startswith(says))] += count
    assert ignored == expected


def test_the_page_is_of_this_table() -> None:
    """`python -m tests.data.odd_files` writes it."""
    assert Path(PAGE).read_text() == page()
