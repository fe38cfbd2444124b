"""The training benchmark runs and writes what it should. What it measures is no test's business."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from ddm_ray.run.graph import Artifact

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = "--quick --measure saving --repeats 2 --width 24 --depth 1"
CLAIM_AND_BEAT = """
import sys
from ddm_ray.jobs.attempts import claim
from ddm_ray.store.store import Store
attempt = claim(Store(sys.argv[1]), "experts/000")
attempt.beat({"phase": "starting"})
attempt.beat({"phase": "training", "step": 1, "first": 0})
input()
"""
COUNT = """
import json, os, sys, time
print("training", flush=True)
beats = []
for step in range(100):
    time.sleep(0.01 * int(sys.argv[1]))
    beats.append((time.monotonic(), step, time.process_time()))
print(json.dumps({"beats": {os.getpid(): beats}}))
"""


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


def test_the_engine_is_beside_pytorch(train: ModuleType, claims: ModuleType) -> None:
    by_point = train.finish(train.start("train_engine", 2, 0.01, "32k:2", keep_memory=True))
    assert set(by_point["32k:2"]) == {"foreach", "fused", "engine", "gradients", "parameters"}
    report = claims.Report()
    train.train_engine.tell(by_point, report)
    assert values(report)["32k parameters, batch 2: the engine's step"] > 0
    assert set(train.train_engine.CLAIMED) < set(train.train_engine.POINTS)


def test_threads_are_beside_one_another(train: ModuleType, claims: ModuleType) -> None:
    way = train.finish(train.start("train_threads", 1, 0.01, environment={"OMP_WAIT_POLICY": "PASSIVE"}))
    assert {frozenset(taken) for taken in way.values()} == {frozenset({"1", "2"})}
    report = claims.Report()
    train.train_threads.tell({"asleep": way}, report)
    assert len(values(report)) == 2 * len(train.train_threads.POINTS) and min(values(report).values()) > 0


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


def test_the_plain_loop_trains(train: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "ROWS", 100)
    url = train.make_run(tmp_path / "run", ["expert.train.steps=1500"])
    assert Path(url).name == "run"
    (process,) = train.loops(url, ["experts/000"])()
    beats = train.finish(process)["beats"]["experts/000"]
    assert beats and 0 < beats[-1][1] <= 1500
    assert beats[-1][2] > 0, "CPU seconds"


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


def test_sides_run_in_turns(turns: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one runs, all processes of the others are stopped."""
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.2)

    def start(naps: int) -> list["subprocess.Popen[str]"]:
        command = [sys.executable, "-c", COUNT, str(naps)]
        return [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    side_by_name = turns.in_turns({"short": lambda: start(1), "long": lambda: start(2)})
    short, long = side_by_name["short"], side_by_name["long"]
    ran = sorted([*short.turns, *long.turns])
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ran))
    assert len(long.turns) > len(short.turns) > 3
    seen = [at for beats in short.beats.values() for at, *_ in beats]
    assert len(seen) == 200
    # Signals take a moment.
    assert not any(begin + 0.02 < at < end for at in seen for begin, end in long.turns)


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


def test_a_recovery_is_told_by_files_and_processes(
    benchmark: Callable[[str], ModuleType], claims: ModuleType, tmp_path: Path
) -> None:
    recovery, over = benchmark("train_recovery"), threading.Event()
    training = threading.Thread(target=over.wait, daemon=True)
    training.start()
    killed = time.time()
    process = subprocess.Popen([sys.executable, "-c", CLAIM_AND_BEAT, str(tmp_path)], stdin=subprocess.PIPE)
    delays = recovery._recovery(str(tmp_path), 1, killed, training)
    process.communicate(b"\n")
    # The system's clock for processes ticks each 10 ms.
    assert -0.02 < delays["process"] < delays["claim"] <= delays["step"] < time.time() - killed
    over.set()
    training.join()
    with pytest.raises(RuntimeError, match="training ended before the kills"):
        recovery._until(lambda: None, training)
    report = claims.Report()
    recoveries = [{"process": 1.0, "claim": 4.0, "step": 5.0 + number} for number in range(21)]
    recovery.tell(recoveries, [{"imports": 2.0}], report)
    claim_values = values(report)
    assert claim_values["from kill to the next step, 95 % of 21"] == pytest.approx(24)
    assert claim_values["from kill to the next step"] == pytest.approx(15)
    assert claim_values["of it until it claims an attempt"] == pytest.approx(3)


def test_runs_across_resizes_are_compared(train: ModuleType, claims: ModuleType, tmp_path: Path) -> None:
    """One that changed its number of ranks differs a little; the interrupted steps are the uninterrupted run's."""
    resizes = train.train_resizes
    assert [leg["stop"] for leg in resizes.legs(2, (2, 3, 1))] == [10, 20, None]
    train.ROWS, rows = 100, train.ROWS
    try:
        uninterrupted = train.make_run(tmp_path / "whole", resizes.settings("fp32"))
        cut = train.make_run(tmp_path / "cut", resizes.settings("fp32"))
    finally:
        train.ROWS = rows
    cases = {uninterrupted: resizes.legs(1, (1,)), cut: resizes.legs(2, (2, 1))}
    train.finish(train.start("train_resizes", json.dumps(cases)))
    assert resizes.differences(uninterrupted, uninterrupted) == (0, 0)
    curve, weights = resizes.differences(uninterrupted, cut)
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
