"""Benchmarks run and write what they should. What they measure is no test's business."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = "--width 32 --heads 2 --depth 1 --image-size 8 --patch-size 4 --steps 1 --repeats 2 --experts 2 --batches 1 4"


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, which imports what lies beside it. It starts itself anew to measure memory."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("sampling")


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("claims")


def test_sampling_measures_all_its_claims(
    sampling: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "claims.json"
    monkeypatch.setattr(sys, "argv", [str(sampling.__file__), *TINY.split(), "--json", str(file)])
    sampling.main()
    printed = capsys.readouterr()
    report = json.loads(file.read_text())
    assert set(report) == {"claims", "machine", "commit", "command", "date"}
    assert "--width 32" in report["command"]
    assert "threads" in report["machine"]
    assert report["commit"]
    found = {claim["name"]: claim for claim in report["claims"]}
    assert len(found) == len(report["claims"])
    for claim in report["claims"]:
        assert set(claim) == {"name", "value", "target", "unit", "holds", "spread"}
        assert isinstance(claim["value"], float)
        holds = None if claim["target"] is None else claim["value"] <= claim["target"]
        assert claim["holds"] is holds
        assert f"| {claim['name']} |" in printed.out
        assert f"| {claim['name']} |" in printed.err
    for batch in (1, 4):
        assert found[f"once, K=2, batch {batch}: time"]["target"] == 1.05
        assert found[f"top-1, K=2, batch {batch}: time without the router's"]["target"] == 1.05
    for strategy in ("top-1", "full"):
        for size in ("Ti", "B"):
            share = found[f"{strategy}, K=2, batch 4: share of a router as {size} to XL"]
            assert share["unit"] == "%"
    weights = found["weights of one expert"]["value"]
    for where in ("resident", "disk"):
        assert found[f"{where}, K=2: peak memory"]["value"] > 2 * weights
    assert found["disk, once, K=2, batch 4, steps 1: time"]["unit"] == "x resident"


def test_help_names_every_option(
    sampling: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sampling.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        sampling.main()
    shown = capsys.readouterr().out
    for option in ("--quick", "--json", "--device", "--experts", "--batches", "--width", "--depth", "--steps"):
        assert option in shown


@pytest.mark.parametrize("quick", [False, True])
def test_sizes_follow_device_and_quick_unless_given(
    sampling: ModuleType, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["sampling.py", "--repeats", "11", *["--quick"] * quick])
    args = sampling.arguments()
    assert args.repeats == 11
    assert args.width == sampling.SIZES["cpu"]["width"]
    assert args.depth == (sampling.QUICK if quick else sampling.SIZES["cpu"])["depth"]


def test_a_claim_holds_up_to_its_target(claims: ModuleType) -> None:
    assert claims.Claim("time", 1.05, "x", 1.05).holds is True
    assert claims.Claim("time", 1.06, "x", 1.05).holds is False
    assert claims.Claim("time", 1.06, "x").holds is None


def test_sides_take_turns_and_the_first_round_is_not_counted(claims: ModuleType) -> None:
    calls: list[str] = []
    seconds = claims.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, "cpu")
    assert calls == ["a", "b"] * 4
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_the_spread_is_the_middle_half_over_the_median(claims: ModuleType) -> None:
    assert claims.median_and_spread([4.0, 1.0, 2.0, 3.0, 5.0]) == (3.0, pytest.approx(2 / 3))
    assert claims.median_and_spread([7.0]) == (7.0, 0.0)
