"""The training benchmark runs and writes what it should. What it measures is no test's business."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = "--quick --measure saving --repeats 2 --width 24 --depth 1"
CLAIM_AND_BEAT = """
import sys
from ddm_ray.storage.attempts import claim
from ddm_ray.storage.store import Store
attempt = claim(Store(sys.argv[1]), "experts/000")
attempt.beat({"phase": "starting"})
attempt.beat({"phase": "training", "step": 1, "first": 0})
input()
"""


@pytest.fixture
def train(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("train")


@pytest.fixture
def sides(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("train_sides")


@pytest.fixture
def claims(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("claims")


def values(report: object) -> dict[str, float]:
    """The claims' values by name, none of them twice."""
    found = {claim.name: claim.value for claim in report.claims}  # type: ignore[attr-defined]
    assert len(found) == len(report.claims)  # type: ignore[attr-defined]
    return found


def test_what_runs_without_ray_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "claims.json"
    command = [sys.executable, str(BENCHMARKS / "train.py"), *TINY.split(), "--json", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    found = {claim["name"]: claim for claim in json.loads(file.read_text())["claims"]}
    assert len(found) == len(json.loads(file.read_text())["claims"])
    assert found["stall per checkpoint"]["target"] == 1.5
    assert found["a step while a state is written"]["value"] > 0


def test_the_engine_is_beside_pytorch(train: ModuleType, claims: ModuleType) -> None:
    found = train.finish(train.start("train_engine", 2, 0.01, "32k:2", keep_memory=True))
    assert set(found["32k:2"]) == {"foreach", "fused", "engine", "gradients", "parameters"}
    report = claims.Report()
    train.train_engine.tell(found, report)
    assert values(report)["32k parameters, batch 2: the engine's step"] > 0
    assert set(train.train_engine.CLAIMED) < set(train.train_engine.POINTS)


def test_the_cost_of_a_parameter_is_that_of_a_line(train: ModuleType, claims: ModuleType) -> None:
    """PyTorch's steps take 10 ns a parameter, fused ones 8, the engine's 1 ms and 11 ns."""
    report = claims.Report()
    found = {
        f"{size}:1": {
            "parameters": [size],
            "foreach": [10e-9 * size] * 3,
            "fused": [8e-9 * size] * 3,
            "engine": [1e-3 + 11e-9 * size] * 3,
            "gradients": [6e-9 * size] * 3,
        }
        for size in (30_000, 1_000_000, 30_000_000)
    }
    train.train_engine.tell(found, report)
    told = values(report)
    assert told["the engine's step over fused AdamW's: fixed"] == pytest.approx(1)
    assert told["the engine's step over fused AdamW's: of a parameter"] == pytest.approx(3)
    assert told["1000000 parameters, batch 1: the engine's step"] == pytest.approx(1.2)
    assert told["1000000 parameters, batch 1: of it clipping, AdamW, EMA"] == pytest.approx(40)


def test_the_plain_loop_trains(train: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "ROWS", 100)
    url = train.make_run(tmp_path / "run", ["expert.train.steps=1500"])
    assert Path(url).name == "run"
    beats = train.train(url, "loop", "experts/000")["experts/000"]
    assert beats and 0 < beats[-1][1] <= 1500
    assert all(0 < each < 1 for _, _, each in beats)


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
    sides.run_stack(url, 500, "experts/000")
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["began"] < told["beats"]["experts/000"][0][0] < told["ended"]
    assert told["beats"]["experts/000"][-1][1] <= 600


def test_a_speed_is_that_of_all_steps_between_the_beats(sides: ModuleType) -> None:
    """1 s each for 10 steps up to step 20, .5 s for the 40 after them; what is outside doesn't count."""
    beats = [(0.0, 10, 9.0), (10.0, 20, 1.0), (20.0, 40, 0.5), (30.0, 60, 0.5), (99.0, 61, 30.0)]
    assert sides.speed(beats, 0, 30) == sides.Speed(pytest.approx(30 / 50), 50)
    assert sides.speed(beats, 5, 30) == sides.Speed(pytest.approx(0.5), 40)
    with pytest.raises(ValueError, match=r"1 heartbeats from 0\.0 to 5\.0"):
        sides.speed(beats, 0, 5)


def test_two_jobs_are_compared_while_both_train(train: ModuleType, claims: ModuleType) -> None:
    """A step takes .1 s of the plain loop, .104 s of one expert alone, .13 s where there are two, once both train."""
    begin = train.SETTLE_SECONDS
    early = [(float(at), 10 * at, 0.1 if at < 20 else 0.13) for at in range(60)]
    late = [(20.0 - begin + at, 5 * at, 0.13) for at in range(40)]
    two = train.speeds({"a": early, "b": late})
    assert [told.seconds for told in two.values()] == pytest.approx([0.13, 0.13])
    speed = train.Speed
    found = {"loop": [{"a": speed(0.1, 1)}], "one": [{"a": speed(0.104, 1)}], "two": [two]}
    found["two loops"] = [{"a": speed(0.125, 1), "b": speed(0.125, 1)}]
    report = claims.Report()
    train.tell_stack(found, 250, report)
    told = values(report)
    assert told["step through the whole stack, checkpoint every 250"] == pytest.approx(1.04)
    assert told["two experts at once: a step, of one alone"] == pytest.approx(1.25)
    assert told["two experts at once: a step, of two plain loops"] == pytest.approx(1.04)
    targets = {claim.name: claim.target for claim in report.claims}
    assert targets["two experts at once: a step, of one alone"] == pytest.approx(1 / 0.95)
    assert [claim.holds for claim in report.claims] == [None, False, False, True]


def test_a_recovery_is_told_by_files_and_processes(
    benchmark: Callable[[str], ModuleType], claims: ModuleType, tmp_path: Path
) -> None:
    recovery, over = benchmark("train_recovery"), threading.Event()
    training = threading.Thread(target=over.wait, daemon=True)
    training.start()
    killed = time.time()
    process = subprocess.Popen([sys.executable, "-c", CLAIM_AND_BEAT, str(tmp_path)], stdin=subprocess.PIPE)
    found = recovery._recovery(str(tmp_path), 1, killed, training)
    process.communicate(b"\n")
    # The system's clock for processes ticks each 10 ms.
    assert -0.02 < found["process"] < found["claim"] <= found["step"] < time.time() - killed
    over.set()
    training.join()
    with pytest.raises(RuntimeError, match="training ended before the kills"):
        recovery._until(lambda: None, training)
    report = claims.Report()
    found = [{"process": 1.0, "claim": 4.0, "step": 5.0 + number} for number in range(21)]
    recovery.tell(found, [{"imports": 2.0}], report)
    told = values(report)
    assert told["from kill to the next step, 95 % of 21"] == pytest.approx(24)
    assert told["from kill to the next step"] == pytest.approx(15)
    assert told["of it until it claims an attempt"] == pytest.approx(3)


def test_runs_across_resizes_are_compared(train: ModuleType, claims: ModuleType, tmp_path: Path) -> None:
    """One that changed its number of ranks differs a little; the interrupted steps are the uninterrupted run's."""
    resizes = train.train_resizes
    assert [leg["stop"] for leg in resizes.legs(2, (2, 3, 1))] == [10, 20, None]
    train.ROWS, rows = 100, train.ROWS
    try:
        whole = train.make_run(tmp_path / "whole", resizes.settings("fp32"))
        cut = train.make_run(tmp_path / "cut", resizes.settings("fp32"))
    finally:
        train.ROWS = rows
    cases = {whole: resizes.legs(1, (1,)), cut: resizes.legs(2, (2, 1))}
    train.finish(train.start("train_resizes", json.dumps(cases)))
    assert resizes.differences(whole, whole) == (0, 0)
    curve, weights = resizes.differences(whole, cut)
    assert 0 < curve < 1e-6 and 0 < weights < 1e-6
    report = claims.Report()
    resizes.tell({(2, "fp32", (2, 1)): (curve, 1e-5)}, report)
    assert [claim.holds for claim in report.claims] == [True, False]


@pytest.mark.parametrize("quick", [False, True])
def test_sizes_follow_quick_unless_given(train: ModuleType, monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--kills", "7", *["--quick"] * quick])
    args = train.measuring("", train.MEASURES, train.SIZES, train.QUICK)
    assert args.kills == 7
    assert args.rounds == (train.QUICK if quick else train.SIZES)["rounds"]
    assert args.width == train.SIZES["width"]
    assert args.measure == train.MEASURES
