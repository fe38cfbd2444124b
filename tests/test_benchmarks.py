"""Benchmarks run and write what they should. What they measure is no test's business."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT
from tests.counted_graphs import counted_graphs

pytestmark = pytest.mark.chaos

TINY = "--width 32 --heads 2 --depth 1 --image-size 8 --patch-size 4 --steps 1 --repeats 2 --experts 2 --batches 1 4"
TINY += " --calls 1 3"


@pytest.fixture
def sampling(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("sampling")


@pytest.fixture
def claims(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("claims")


def test_sampling_measures_all_its_claims(
    sampling: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "claims.json"
    monkeypatch.setattr(sys, "argv", [str(sampling.__file__), *TINY.split(), "--json", str(file)])
    with counted_graphs():
        sampling.main()
    printed = capsys.readouterr()
    report = json.loads(file.read_text())
    assert set(report) == {"claims", "machine", "commit", "command", "date"}
    assert "--width 32" in report["command"]
    assert "threads" in report["machine"]
    assert report["commit"]
    claim_by_name = {claim["name"]: claim for claim in report["claims"]}
    assert len(claim_by_name) == len(report["claims"])
    for claim in report["claims"]:
        assert set(claim) == {"name", "value", "target", "unit", "holds", "spread"}
        assert isinstance(claim["value"], float)
        holds = None if claim["target"] is None else claim["value"] <= claim["target"]
        assert claim["holds"] is holds
        assert f"| {claim['name']} |" in printed.out
        assert f"| {claim['name']} |" in printed.err
    assert claim_by_name["once, K=2, batch 4: time"]["target"] == 1.05
    full = claim_by_name["texts, full, K=2, batch 4: time without the router's"]
    assert (full["target"], full["unit"]) == (1.05, "x K dense")
    assert claim_by_name["fp32: 3 sizes made"]["unit"] == "s" and "CUDA graphs are left out" in printed.err
    assert claim_by_name["disk, K=2: peak memory"]["value"] > 2 * claim_by_name["weights of one expert"]["value"]


def test_a_claim_holds_up_to_its_target(claims: ModuleType) -> None:
    assert claims.Claim("time", 1.05, "x", 1.05).holds is True
    assert claims.Claim("time", 1.06, "x", 1.05).holds is False
    assert claims.Claim("time", 1.06, "x").holds is None


def test_the_spread_is_the_middle_half_over_the_median(claims: ModuleType) -> None:
    assert claims.median_and_spread([4.0, 1.0, 2.0, 3.0, 5.0]) == (3.0, pytest.approx(2 / 3))
    assert claims.median_and_spread([7.0]) == (7.0, 0.0)


@pytest.mark.parametrize(
    ("script", "options", "targets"),
    [
        (
            "data.py",
            "--measure sampling kmeans loader --repeats 2 --steps 10 --sampled 4000 --rows 2000 --fine 32 --loaded 600",
            {"k-means: time": 2, "sampling: time a row": 1.5, "8x8 pixels, streamed: time of a row, to a step": 0.1},
        ),
        (
            "train.py",
            "--quick --measure saving --repeats 2 --width 24 --depth 1",
            {"stall per checkpoint": 1.5, "a step while a state is written": None},
        ),
    ],
)
def test_another_benchmark_measures_what_runs_in_its_process(
    tmp_path: Path, script: str, options: str, targets: dict[str, float | None]
) -> None:
    file = tmp_path / "claims.json"
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options.split(), "--json", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    claims = {claim["name"]: claim for claim in json.loads(file.read_text())["claims"]}
    assert {name: claims[name]["target"] for name in targets} == targets
    assert all(claims[name]["value"] > 0 for name in targets)
