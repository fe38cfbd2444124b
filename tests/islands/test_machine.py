"""The plan of a run on one machine: rows, memory, disk and time, and a line for what it won't hold."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner, Result

from ddm_ray import cli
from ddm_ray.config import load_recipe
from ddm_ray.data.sources.look import count_rows
from ddm_ray.islands.machine import MachinePlan, makespan, plan_machine
from ddm_ray.islands.needs import needs_of
from ddm_ray.placement import TrainPlacement
from ddm_ray.storage.attempts import claim
from ddm_ray.storage.graph import MONOLITH, ROUTER, STUDENT, Artifact, expert, trained_of, wanted_of
from ddm_ray.storage.run import Run
from tests.conftest import ROOT
from tests.random_run import make_data
from tests.storage.jobs import beat


def begin(tmp_path: Path, recipe: str = "tiny", *settings: str) -> Run:
    return Run.create(str(tmp_path / "run"), load_recipe(recipe, settings))


def planned(run: Run) -> MachinePlan:
    return plan_machine(run, wanted_of(run.config), TrainPlacement(), "never")


def invoke(*arguments: str) -> Result:
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == 0, done.output
    return done


def plan_apart(change: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Plan with trial steps, in a process of its own: DeepSpeed keeps the first world that a process has."""
    code = f"import sys; import {change.rpartition('.')[0]} as changed; changed.{change.rpartition('.')[2]}"
    code += "; from ddm_ray import cli; cli.main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "plan", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_rows_are_counted_without_reading_them(tmp_path: Path) -> None:
    photos, tables, tars = (tmp_path / name for name in ("photos", "tables", "tars"))
    for name in ("a/1.png", "a/2.jpg", "b/3.png", "b/notes.txt"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_bytes(b"no image, which only reading tells")
    for folder in (tables, tars):
        folder.mkdir()
    for number in range(2):
        pq.write_table(pa.table({"image": [b"x"] * 7, "label": [0] * 7}), tables / f"{number}.parquet")
    (tars / "0.tar").write_bytes(bytes(1024))
    expected = {"digits": 1797, "shapes:1_000": 1000, str(photos): 3, str(tables): 14, str(tars): None}
    expected |= {str(tmp_path / "none"): None, "s3://nowhere/at/all": None}
    for source, count in expected.items():
        data = load_recipe("images64", (f"data.source={source}", "data.num_classes=2")).data
        assert count_rows(data) == count, source


def test_rows_are_estimated_before_and_exact_after(tmp_path: Path) -> None:
    before = planned(begin(tmp_path))
    assert (before.rows, before.rows_K, before.clusters) == (1797, None, 2)
    assert before.rows_bytes == 1797 * (64 + 64 + 8 * 4) and before.disk > before.rows_bytes
    run = make_data(str(tmp_path / "made"), num_rows=60)
    after = planned(run)
    sizes = {**run.store.sizes("rows"), **{f"p/{key}": size for key, size in run.store.sizes("partition").items()}}
    assert after.rows == 60 and after.rows_K and sum(after.rows_K) == 54 and after.rows_bytes == sum(sizes.values())


def test_rows_of_owners_are_not_counted_by_anybody_else(tmp_path: Path) -> None:
    plan = planned(begin(tmp_path, "tiny", "partition.method=given"))
    assert (plan.rows, plan.rows_K, plan.rows_bytes) == (None, None, None)


def test_what_the_machine_will_not_hold_is_said(tmp_path: Path) -> None:
    plan = planned(begin(tmp_path, "images64"))
    expert_bytes = plan.kinds[0].memory
    roomy = replace(plan, memory_total=1e15, memory_free=1e15, disk_free=10**15)
    assert roomy.warnings == []
    needs = f"expert: training takes {expert_bytes / 1e9:.3g} GB of memory, and this machine"
    assert replace(roomy, memory_free=expert_bytes - 5e8).warnings == [
        f"{needs} has free now {expert_bytes / 1e9 - 0.5:.3g} GB: it won't fit"
    ]
    assert f"{needs} has 1 GB: it won't fit" in replace(roomy, memory_total=1e9, memory_free=1e9).warnings
    assert replace(roomy, disk_free=10**9).warnings == [
        f"rows, states and weights take up to {plan.disk / 1e9:,.3g} GB more, and the disk has 1 GB free: it won't"
        " hold them"
    ]


def test_a_gpu_is_planned_for_by_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5e8, 1e9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    run = begin(tmp_path, "images64")
    plan = plan_machine(run, wanted_of(run.config), TrainPlacement(use_gpu=True), "never")
    (need, _) = needs_of(run, wanted_of(run.config))
    assert (plan.kinds[0].memory, plan.at_once) == (need.memory(1, True)[1], 3)
    assert f"expert: training takes {plan.kinds[0].memory / 1e9:.3g} GB of memory, and the GPU has" in plan.warnings[0]


def test_jobs_that_are_queued_take_turns_and_a_student_comes_last(tmp_path: Path) -> None:
    config = begin(tmp_path).config
    jobs = {expert(0): 10.0, expert(1): 10.0, ROUTER: 1.0}
    assert makespan(config, jobs, 1) == 21 and makespan(config, jobs, 2) == 11 and makespan(config, jobs, 9) == 10
    assert makespan(config, {**jobs, MONOLITH: 20.0}, 2) == 21, "the longest first"
    assert makespan(config, {**jobs, STUDENT: 5.0}, 9) == 15
    assert makespan(config, {}, 2) == 0


def test_times_are_those_of_trainings_before(tmp_path: Path) -> None:
    run = make_data(str(tmp_path / "run"), num_rows=60)
    for artifact in wanted_of(run.config):
        beat(claim(run.store, artifact, {}), 1, 150, flops_per_second=1e6)
    plan = plan_machine(run, wanted_of(run.config), TrainPlacement(), "if quick")
    assert {each.source for each in plan.kinds} == {"as trained so far"}
    assert [each.left for each in plan.kinds] == [1.0, 0.5], "half of each"
    times = {each.kind: each.seconds or 0.0 for each in plan.kinds}
    assert plan.seconds == pytest.approx(makespan(run.config, _halves(run, times), plan.at_once))


def _halves(run: Run, times: dict[str, float]) -> dict[Artifact, float]:
    return {artifact: times[artifact.kind] / 2 for artifact in wanted_of(run.config)}


def test_a_plan_for_this_machine_takes_trial_steps(tmp_path: Path) -> None:
    run = begin(tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    quick = "ddm_ray.islands.calibration.SECONDS=1e-2"
    numbers = json.loads(plan_apart(quick, run.url, "--json", "--monolith", "--student").stdout)
    kinds = {each["kind"]: each for each in numbers["kinds"]}
    assert kinds.keys() == {artifact.kind for artifact in trained_of(run.config)}
    assert all(each["source"] == "by trial steps" and each["seconds"] > 0 for each in kinds.values())
    assert all(each["memory_measured"] and each["memory"] > 5e8 for each in kinds.values())
    assert kinds["monolith"]["parameters"] == kinds["expert"]["parameters"] > kinds["router"]["parameters"] > 0
    assert numbers["seconds"] >= kinds["monolith"]["seconds"] and numbers["disk"] > 0
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}, "nothing is written"


def test_trial_steps_that_take_long_or_have_no_room_are_left_out(tmp_path: Path) -> None:
    """Asked for or not where there is no room; a large batch takes long on any CPU."""
    batch = "={steps: 9, global_batch: 400_000_000, learning_rate: 1.0e-3, ema_decay: 0.9}"
    run = begin(tmp_path, "tiny", *(f"{kind}.train{batch}" for kind in ("expert", "router")))
    done = plan_apart("ddm_ray.islands.machine.__name__", run.url)
    assert "expert: not measured: trial steps may take " in done.stdout
    assert "router: not measured: trial steps may take " in done.stdout
    assert "a time that isn't known" in done.stdout
    done = plan_apart("ddm_ray.islands.machine.free_bytes=lambda: 1e9", run.url, "--calibrate")
    assert "expert: not measured: trial steps need 1.4 GB of memory" in done.stdout
    assert "expert: training takes 1.4 GB of memory, and this machine has free now 1 GB: it won't fit" in done.stderr


def test_init_ends_with_the_plan_in_short(tmp_path: Path) -> None:
    lines = invoke("init", str(tmp_path / "run"), "--recipe", "digits").stdout.splitlines()
    assert lines[1].startswith("rows: 1,797 in 4 clusters, about 449 each, 460 kB")
    assert lines[2].startswith("trains: 4 x expert of 392 k parameters, 1 x router of 31.4 k parameters; more than 1.4")
    assert lines[3].startswith("disk: up to 58 MB of ") and "hours: not measured, `ddm plan`" in lines[3]


@pytest.mark.parametrize(
    ("option", "value"), [("--island", "a"), ("--flops", "a=1e9"), ("--mfu", "50"), ("--egress-price", "1")]
)
def test_options_for_islands_need_their_file(tmp_path: Path, option: str, value: str) -> None:
    done = CliRunner().invoke(cli.main, ["plan", begin(tmp_path).url, option, value])
    assert done.exit_code == 1
    assert done.stderr == f"error: {option} is for islands; name their file with --islands FILE\n"
