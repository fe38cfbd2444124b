"""The training benchmark runs and writes what it should. What it measures is no test's business."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ddm_ray.run.graph import Artifact

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = "--quick --measure saving --repeats 2 --width 24 --depth 1"


@pytest.fixture
def train(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("train")


@pytest.fixture
def sides(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("train_sides")


@pytest.fixture
def turns(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("train_turns")


@pytest.fixture
def claims(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("claims")


def values(report: object) -> dict[str, float]:
    """The claims' values by name, none of them twice."""
    value_by_name = {claim.name: claim.value for claim in report.claims}  # type: ignore[attr-defined]
    assert len(value_by_name) == len(report.claims)  # type: ignore[attr-defined]
    return value_by_name


def test_what_runs_without_ray_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "claims.json"
    command = [sys.executable, str(BENCHMARKS / "train.py"), *TINY.split(), "--json", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    claim_by_name = {claim["name"]: claim for claim in json.loads(file.read_text())["claims"]}
    assert len(claim_by_name) == len(json.loads(file.read_text())["claims"])
    assert claim_by_name["stall per checkpoint"]["target"] == 1.5
    assert claim_by_name["a step while a state is written"]["value"] > 0


def test_the_cost_of_a_parameter_is_that_of_a_line(train: ModuleType, claims: ModuleType) -> None:
    """PyTorch's steps take 10 ns a parameter, fused ones 8, the engine's 1 ms and 11 ns."""
    report = claims.Report()
    by_point = {
        f"{size}:1": {
            "parameters": [size],
            "foreach": [10e-9 * size] * 3,
            "fused": [8e-9 * size] * 3,
            "engine": [1e-3 + 11e-9 * size] * 3,
            "gradients": [6e-9 * size] * 3,
        }
        for size in (30_000, 1_000_000, 30_000_000)
    }
    train.train_engine.tell(by_point, report)
    claim_values = values(report)
    assert claim_values["the engine's step over fused AdamW's: fixed"] == pytest.approx(1)
    assert claim_values["the engine's step over fused AdamW's: of a parameter"] == pytest.approx(3)
    assert claim_values["1000000 parameters, batch 1: the engine's step"] == pytest.approx(1.2)
    assert claim_values["1000000 parameters, batch 1: of it clipping, AdamW, EMA"] == pytest.approx(40)


def test_jobs_are_watched_through_the_whole_stack(
    ray_cluster: str,
    train: ModuleType,
    sides: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train, "ROWS", 100)
    url = train.make_run(tmp_path / "run", ["expert.train.steps=600"])
    began = time.monotonic()
    sides.run_stack(url, 500, Artifact("experts/000"))
    ready, *_, beats_json = capsys.readouterr().out.splitlines()
    assert ready == sides.READY
    beats = json.loads(beats_json)["beats"]["experts/000"]
    assert 0 < beats[0][1] <= beats[-1][1] <= 600
    assert began < beats[0][0] <= beats[-1][0] < time.monotonic() and beats[-1][2] > 0


def test_a_speed_counts_the_seconds_that_a_side_ran(turns: ModuleType) -> None:
    """A step of .5 s, in every other second; what is outside doesn't count. Of two jobs, that of both together."""
    every = [(float(at), at + 1.0) for at in range(0, 60, 2)]
    beats = [(at + 1.0, at, 0.4 * at) for at in range(0, 40, 2)]
    one = turns.Side({"a": [*beats, (99.0, 1000, 0.0)]}, every)
    assert turns.speed(one, 0, 40) == turns.Speed(pytest.approx(0.5), pytest.approx(0.4))
    two = turns.Side({"a": beats, "b": [(at, step // 2, cpu) for at, step, cpu in beats]}, every)
    assert turns.speed(two, 0, 40) == turns.Speed(pytest.approx(1 / 3), pytest.approx(0.6))
    with pytest.raises(ValueError, match=r"1 heartbeats from 0\.0 to 2\.0"):
        turns.speed(one, 0, 2)


def test_sides_are_compared_while_all_of_both_train(train: ModuleType, turns: ModuleType, claims: ModuleType) -> None:
    """A step takes .1 s of the plain loop, .104 s of one expert alone, .13 s where there are two, once both train."""

    def side(*each: float, begin: float = 0.0, took: float = 1.0) -> object:
        beats = [[(begin + at, at / seconds, took * at) for at in range(60)] for seconds in each]
        return turns.Side({str(number): job_beats for number, job_beats in enumerate(beats)}, [(0.0, 100.0)])

    two = side(0.13, 0.13, took=0.88)
    early = [(at - 30.0, 10 * (at - 30), 0.88 * at) for at in range(30)]
    two.beats["0"][:0] = early  # type: ignore[attr-defined]
    rounds = {"loop": [side(0.1)], "one": [side(0.104, begin=5.0)], "two": [two], "two loops": [side(0.125, 0.125)]}
    report = claims.Report()
    train.tell_stack(rounds, 250, report)
    claim_values = values(report)
    assert claim_values["step through the whole stack, checkpoint every 250"] == pytest.approx(1.04)
    assert claim_values["two experts at once: a step, of one alone"] == pytest.approx(1.25)
    assert claim_values["two experts at once: CPU time of a step, of one alone"] == pytest.approx(1.1)
    assert claim_values["two plain loops at once: a step, of one alone"] == pytest.approx(1.25)
    assert claim_values["two experts at once: a step, of two plain loops"] == pytest.approx(1.04)
    targets = {claim.name: claim.target for claim in report.claims}
    assert targets["two experts at once: a step, of one alone"] == pytest.approx(1 / 0.95)
    assert [claim.holds for claim in report.claims] == [None, False, False, None, None, True]
