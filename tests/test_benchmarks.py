"""Benchmarks run and write what they should. What they measure is no test's business."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ddm_ray.models import weights
from tests.counted_graphs import counted_graphs

TINY = "--width 32 --heads 2 --depth 1 --image-size 8 --patch-size 4 --steps 1 --repeats 2 --experts 2 --batches 1 4"
TINY += " --calls 1 3"
# One expert weighs 15 MiB: more than what the peak of a process varies by.
LARGER = "--width 256 --heads 2 --depth 3 --image-size 8 --patch-size 4 --steps 1 --experts 2 6"


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
    for batch in (1, 4):
        assert claim_by_name[f"once, K=2, batch {batch}: time"]["target"] == 1.05
        assert claim_by_name[f"top-1, K=2, batch {batch}: time without the router's"]["target"] == 1.05
        assert claim_by_name[f"texts, once, K=2, batch {batch}: time without the router's"]["target"] == 1.05
    full = claim_by_name["texts, full, K=2, batch 4: time without the router's"]
    assert (full["target"], full["unit"]) == (1.05, "x K dense")
    for strategy in ("top-1", "full"):
        for size in ("Ti", "B"):
            share = claim_by_name[f"{strategy}, K=2, batch 4: share of a router as {size} to XL"]
            assert share["unit"] == "%"
    for rows in (1, 3):
        assert claim_by_name[f"fp32, {rows} rows, plain: a velocity"]["unit"] == "ms"
        assert claim_by_name[f"fp32, {rows} rows, compiled: time"]["unit"] == "x plain"
    assert claim_by_name["fp32: 3 sizes made"]["unit"] == "s" and "CUDA graphs are left out" in printed.err
    weights = claim_by_name["weights of one expert"]["value"]
    for where in ("resident", "disk"):
        assert claim_by_name[f"{where}, K=2: peak memory"]["value"] > 2 * weights
    assert claim_by_name["disk, K=2, batch 4, steps 1: time"]["unit"] == "x resident"


def test_memory_that_grows_with_the_experts_is_found(
    sampling: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With 6 resident all experts that were fetched stay, as they would if what is fetched weren't let go of."""
    monkeypatch.setattr(sys, "argv", [str(sampling.__file__), *LARGER.split(), "--resident", "6"])
    bench, report = sampling.Bench(sampling.arguments()), sampling.Report()
    expert, file = bench.expert(), tmp_path / "expert.safetensors"
    file.write_bytes(weights.weights_as_bytes(expert, bench.spec)[0])
    sampling.measure_growth(bench, "disk", file, file.stat().st_size / sampling.MIB, report)
    growth = report.claims[-1]
    assert growth.name == "disk: growth for each expert more"
    assert growth.value > 0.8
    assert growth.holds is False


def test_each_expert_has_two_rows_however_many_there_are(sampling: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sampling.py", *TINY.split()])
    bench = sampling.Bench(sampling.arguments())
    for k in (2, 4, 16):
        request = sampling.balanced(bench, k)
        assert request.cluster_B.bincount().tolist() == [2] * k
        assert request.cluster_B.tolist() != sorted(request.cluster_B.tolist())


def test_noise_is_on_neither_side(sampling: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are as told here, so that the quotients are: noise 1, a network 10, a call of the router 3."""
    monkeypatch.setattr(sys, "argv", ["sampling.py", *TINY.split()])
    bench, report = sampling.Bench(sampling.arguments()), sampling.Report()
    seconds = {"noise": 1.0, "dense": 10.0, "once 2": 11.5, "top-1 2": 15.0, "router 2": 3.0, "router": 3.0}
    seconds |= {"once": 14.0, "router once": 3.0, "full": 25.0, "router full": 3.0, "top-1": 16.0}
    monkeypatch.setattr(sampling.Bench, "interleaved", lambda self, sides: {name: [seconds[name]] for name in sides})
    sampling.measure_time(bench, [None, None], report)
    sampling.measure_texts(sampling.Bench(sampling.arguments(), texts=True), report)
    sampling.measure_router(bench, [None, None], report)
    values = {claim.name: claim.value for claim in report.claims}
    assert values["once, K=2, batch 4: time"] == pytest.approx(1.05)
    assert values["top-1, K=2, batch 4: time without the router's"] == pytest.approx(1.1)
    assert values["texts, once, K=2, batch 4: time without the router's"] == pytest.approx(1.0)
    assert values["texts, full, K=2, batch 4: time without the router's"] == pytest.approx(1.05)
    assert values["top-1, K=2, batch 4: share of a router as Ti to XL"] == pytest.approx(20)
    assert values["full, K=2, batch 4: share of a router as Ti to XL"] == pytest.approx(12.5)


def test_help_names_every_option(
    sampling: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sampling.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        sampling.main()
    shown = capsys.readouterr().out
    for option in (
        "--quick",
        "--json",
        "--device",
        "--experts",
        "--batches",
        "--calls",
        "--conditions",
        "--resident",
        "--width",
        "--steps",
    ):
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
