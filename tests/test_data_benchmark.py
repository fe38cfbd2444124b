"""The data benchmark runs and writes what it should. What it measures is no test's business."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = "--measure sampling kmeans loader --repeats 2 --steps 10"
TINY += " --sampled 4000 --rows 2000 --fine 32 --loaded 600"


@pytest.fixture
def data(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("data")


def test_what_runs_in_its_process_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "claims.json"
    command = [sys.executable, str(BENCHMARKS / "data.py"), *TINY.split(), "--json", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    claim_by_name = {claim["name"]: claim for claim in json.loads(file.read_text())["claims"]}
    assert len(claim_by_name) == len(json.loads(file.read_text())["claims"])
    assert claim_by_name["k-means: time"]["target"] == claim_by_name["k-means, balanced: time"]["target"] == 2
    assert claim_by_name["sampling: time a row"]["target"] == 1.5
    for kind in ("8x8 pixels", "4x32x32 latents"):
        for where in ("in memory", "streamed"):
            claim = claim_by_name[f"{kind}, {where}: time of a row, to a step"]
            assert claim["target"] == 0.1
            assert claim["unit"] in ("step of tiny", "step of digits")


def test_start_up_is_in_the_whole_alone(data: ModuleType) -> None:
    """On two cores, starting takes 5 s, an image 4 s of a loop and 3 of the stage, which has both cores."""
    repeats = {
        side: [{"seconds": 5 + each * images, "cpu": 10 + each * images, "first": 6.0}]
        for images in (25, 100)
        for side, each in ((f"prepare {images}", 3), (f"1 {images}", 4), (f"2 {images}", 2.5))
    }
    report = data.Report()
    data.tell_prepare(repeats, 25, 100, 2, report)
    claims = {claim.name: claim for claim in report.claims}
    assert claims["prepare, each image more: core seconds"].value == pytest.approx(2 * 3 / 4)
    assert claims["prepare, each image more: core seconds"].holds is False
    assert claims["prepare, 100 images: core seconds"].value == pytest.approx(2 * 305 / 405)
    assert claims["2 loops side by side, each image more: core seconds"].value == pytest.approx(2 * 2.5 / 4)
    assert claims["prepare, each image more: time"].value == pytest.approx(3 / 2.5)


@pytest.mark.parametrize("fault", [None, "pixels", "embedding", "missing"])
def test_sides_that_made_other_rows_are_not_compared(data: ModuleType, tmp_path: Path, fault: str | None) -> None:
    stage = {"id": ["a/0", "a/1"], "data": [b"00", b"11"], "embedding": [np.float32([1]).tobytes()] * 2}
    loop = {name: values[::-1] for name, values in stage.items()}
    if fault == "missing":
        loop = {name: values[:1] for name, values in loop.items()}
    elif fault == "pixels":
        loop["data"] = [b"11", b"01"]
    elif fault == "embedding":
        loop["embedding"] = [np.float32([1.1]).tobytes()] * 2
    (tmp_path / "run" / "rows").mkdir(parents=True)
    pq.write_table(pa.table(stage), tmp_path / "run" / "rows" / "part-0.parquet")
    pq.write_table(pa.table(loop), tmp_path / "0.parquet")
    if fault is None:
        return data.require_same_rows(tmp_path, 2)
    with pytest.raises((RuntimeError, AssertionError)):
        data.require_same_rows(tmp_path, 2)
