"""The plan of a run: rows, memory, disk, time and price, before and while it is trained."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from ddm_ray import cli
from ddm_ray.config import load_recipe
from ddm_ray.data.sources.look import count_source_rows
from ddm_ray.islands import plan as planning
from ddm_ray.islands.needs import bytes_a_parameter, needs_of, too_large
from ddm_ray.islands.plan import RunPlan
from ddm_ray.models.flops import num_frozen
from ddm_ray.placement import Island, TrainPlacement, Workers
from ddm_ray.run.graph import MONOLITH, ROUTER, STUDENT, Artifact, expert, experts_of, trained_of, wanted_of
from ddm_ray.run.run import Run
from tests.conftest import ROOT
from tests.random_run import make_data

pytestmark = pytest.mark.contract

HERE = Island()


def begin(tmp_path: Path, recipe: str = "tiny", *settings: str) -> Run:
    return Run.create(str(tmp_path / "run"), load_recipe(recipe, settings))


def planned(run: Run, site: Island = HERE) -> RunPlan:
    return planning.plan(run, wanted_of(run.config), site, measures=False)


def plan_apart(*arguments: str, change: str = "ddm_ray.train.trial.SECONDS=1e-2") -> subprocess.CompletedProcess[str]:
    """Plan with trial steps, in a process of its own: DeepSpeed keeps the first world that a process has."""
    module, _, changed = change.rpartition(".")
    code = f"import sys; import {module} as changed; changed.{changed}; from ddm_ray import cli; cli.main(sys.argv[1:])"
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
        assert count_source_rows(data) == count, source


def test_rows_are_estimated_before_and_exact_after(tmp_path: Path) -> None:
    before = planned(begin(tmp_path))
    size = 64 + 64 + 8 * 4
    assert (before.rows, before.rows_bytes) == (1797, 1797 * size) and before.disk > 1797 * size
    assert [each.rows for each in before.trainings] == [(898, 898), (1797, 1797)]
    run = make_data(str(tmp_path / "made"), num_rows=60)
    after = planned(run)
    sizes = {**run.store.sizes("rows"), **{f"p/{key}": size for key, size in run.store.sizes("partition").items()}}
    assert (after.rows, after.rows_bytes) == (60, sum(sizes.values())) and after.disk < before.disk
    experts, router = after.trainings
    files = {key: size for key, size in run.store.sizes("partition").items() if "/train-" in key}
    by_cluster = [sum(size for key, size in files.items() if f"cluster=00{cluster}" in key) for cluster in (0, 1)]
    assert experts.rows and sum(experts.rows) == 54 and experts.rows_bytes == (min(by_cluster), max(by_cluster))
    assert router.rows == (54, 54) and router.rows_bytes == (sum(by_cluster),) * 2


def test_rows_of_owners_are_not_counted_by_anybody_else(tmp_path: Path) -> None:
    plan = planned(begin(tmp_path, "tiny", "partition.method=given"))
    assert (plan.rows, plan.rows_bytes, plan.trainings[0].rows) == (None, None, None)


def test_the_papers_large_run(tmp_path: Path) -> None:
    run = begin(tmp_path, "ddm-24b")
    (need,) = needs_of(run, experts_of(run.config))
    assert need.job.training_flops(need.job.train.steps) == pytest.approx(0.77e21, rel=0.01)
    assert need.state_bytes == 16 * need.parameters == pytest.approx(48e9, rel=0.01)
    by_stage = need.memory(8, use_gpu=True)
    assert by_stage[0] is None, "in bf16"
    assert by_stage[1:] == [pytest.approx(need.parameters * size) for size in (4 + 22 / 8, 2 + 24 / 8, 26 / 8)]


def test_a_gpu_is_planned_for_by_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5e8, 1e9))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    run = begin(tmp_path, "images64")
    plan = planned(run, Island(train=TrainPlacement(use_gpu=True)))
    (need, _) = needs_of(run, wanted_of(run.config))
    assert (plan.trainings[0].memory, plan.at_once, plan.memory_free) == (need.memory(1, True)[1], 3, 5e8)
    assert planned(run, Island(name="north", train=TrainPlacement(use_gpu=True))).at_once == 1


@pytest.mark.parametrize("teacher", ["label", "top-2"])
def test_a_students_teachers_take_memory_and_time_where_they_are(tmp_path: Path, teacher: str) -> None:
    settings = ("partition.num_clusters=5", "expert.train.batch=8", f"student.teacher={teacher}")
    run = make_data(str(tmp_path / "run"), settings=settings, num_rows=60)
    expert_need, student, router = needs_of(run, [expert(0), STUDENT, ROUTER])
    assert expert_need.memory(1, False, 2) == expert_need.memory(1, False)
    asked = 0 if teacher == "label" else router.parameters
    for use_gpu, size in ((False, 4), (True, 2)):
        alone = bytes_a_parameter(student.job.train.precision, 1, use_gpu)
        for teachers, held in ((None, 5), (2, 2), (9, 5)):
            beside = size * (held * expert_need.parameters + asked)
            with_teachers = [one and one * student.parameters + beside for one in alone]
            assert student.memory(1, use_gpu, teachers) == with_teachers


TIMES = {"expert": (10.0, 1e9), "router": (1.0, 1e9), "monolith": (20.0, 1e9)}
"""Seconds of a training of each kind, by trial steps, and memory."""


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial steps that take what TIMES says, on a machine of four cores."""

    def measured(kinds: list[planning.KindPlan], *_: object) -> list[planning.KindPlan]:
        return [planning.replace(each, seconds=TIMES[each.kind][0], memory=TIMES[each.kind][1]) for each in kinds]

    monkeypatch.setattr(planning, "_measured", measured)
    monkeypatch.setattr(planning, "usable_cores", lambda: 4)
    monkeypatch.setattr(planning, "free_bytes", lambda: 8e9)


@pytest.mark.usefixtures("tried")
def test_all_are_trained_side_by_side_and_what_is_trained_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_data(str(tmp_path / "run"), num_rows=60)

    def left(trained: Mapping[str, float]) -> Callable[..., object]:
        return lambda _run, artifact, _files: type("Status", (), {"fraction": trained.get(artifact, 0.0)})

    def seconds(trained: Mapping[str, float], *more: Artifact, site: Island = HERE) -> float | None:
        monkeypatch.setattr("ddm_ray.islands.needs.status", left(trained))
        return planning.plan(run, [*wanted_of(run.config), *more], site, measures=True).seconds

    assert seconds({}) == 10, "three of them on four cores"
    assert seconds({}, MONOLITH) == 20, "the longest"
    assert seconds({}, site=Island(train=TrainPlacement(workers=Workers(min=2, max=2)))) == 10.5
    assert seconds({}, site=Island(name="north")) == 21, "an island trains one at a time"
    assert seconds({expert(0): 1.0, expert(1): 0.5}, site=Island(name="north")) == 6
    monkeypatch.setattr(planning, "free_bytes", lambda: 1.5e9)
    assert seconds({}) == 21, "memory for one"


def test_trial_steps_say_how_long_it_takes(tmp_path: Path) -> None:
    run = begin(tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    numbers = json.loads(plan_apart(run.url, "--json", "--monolith", "--student").stdout)
    kinds = {each["kind"]: each for each in numbers["trainings"]}
    assert kinds.keys() == {artifact.kind for artifact in trained_of(run.config)}
    assert all(each["seconds"] > 0 for each in kinds.values())
    assert all(each["measured"] and each["memory"] > 5e8 for kind, each in kinds.items() if kind != "student")
    assert kinds["monolith"]["parameters"] == kinds["expert"]["parameters"] > kinds["router"]["parameters"] > 0
    assert numbers["seconds"] >= kinds["monolith"]["seconds"] and numbers["disk"] > 0
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}, "nothing is written"


def test_trial_steps_that_have_no_room_are_left_out(tmp_path: Path) -> None:
    done = plan_apart(begin(tmp_path).url, change="ddm_ray.islands.plan.free_bytes=lambda: 1e9")
    assert "expert: no time: too little memory for trial steps" in done.stdout
    assert "expert: training takes 1.4 GB of memory, 1 GB are free" in done.stderr


@pytest.mark.usefixtures("tried")
def test_an_island_has_its_price(tmp_path: Path) -> None:
    (tmp_path / "islands.yaml").write_text("islands: {north: {workers: 2, price_per_hour: 3600}}")
    run, options = begin(tmp_path), ("--islands", str(tmp_path / "islands.yaml"), "--island", "north")
    done = CliRunner().invoke(cli.main, ["plan", run.url, *options])
    assert done.exit_code == 0, done.output
    (head, *lines) = [line for line in done.stdout.splitlines() if line.strip() and "──" not in line]
    assert head.split()[-3:] == ["time", "and", "price"]
    (name, number, *_, seconds, unit, price) = lines[0].replace(",", "").split()
    assert (name, number, float(seconds), unit, float(price)) == ("expert", "2", 10.0, "s", 10.0)


def test_init_ends_with_the_table(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.main, ["init", str(tmp_path / "run"), "--recipe", "digits"])
    lines = [line.split() for line in done.stdout.splitlines()]
    (experts,) = [line for line in lines if line[:1] == ["expert"]]
    assert experts == ["expert", "4", "392", "k", "449", "28.7", "kB", ">", "1.42", "GB", "7.83", "MB", "?"]
    assert lines[-1][:3] == ["next:", "ddm", "prepare"]


ISLANDS = """
islands:
  attic: {memory_gib: 2.5}
  office: {use_gpu: true, memory_gib: 4}
  lab: {use_gpu: true, workers: 8, memory_gib: 80}
  shed: {}
  hut: {memory_gib: 1}
"""


def proposed(run: Run, islands: Path, text: str = ISLANDS) -> str:
    islands.write_text(text)
    done = CliRunner().invoke(cli.main, ["plan", run.url, "--islands", str(islands)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_each_island_is_told_the_largest_expert_that_it_has_memory_for(tmp_path: Path) -> None:
    settings = ("data.source=digits", "data.channels=3", "data.num_classes=10", "partition.numbers=[0, 1, 4, 5]")
    run = begin(tmp_path, "images64", *settings, "partition.num_clusters=4")
    shown = proposed(run, tmp_path / "islands.yaml")
    for line in ("attic: an expert of size Ti at most", "office: an expert of size B", "lab: an expert of size XL"):
        assert line in shown
    assert "shed: its memory isn't known: set memory_gib" in shown and "hut: 1.07 GB of memory are too little" in shown
    setting = shown.partition("--set '")[2].partition("'")[0]
    config = load_recipe("images64", (*settings, "partition.num_clusters=4", setting))
    assert [config.expert_of(cluster).model.width for cluster in (0, 1, 4, 5)] == [192, 768, 1152, 192]
    again = Run.create(str(tmp_path / "sized"), config)
    islands = {name: Island(name=name, memory_gib=gib) for name, gib in (("a", 2.5), ("b", 100))}
    sizes = [each.size for each in planning.largest_sizes(again, [*islands.values()])]
    assert sizes == ["Ti", "XL"]
    models = wanted_of(config)
    assert too_large(again, models, Island(name="a")) == []
    assert too_large(again, models, islands["b"]) == []
    assert too_large(again, models, islands["a"]) == [expert(1), expert(4)]
    done = CliRunner().invoke(cli.main, ["work", again.url, "--island", "hut", "--placement", '{"memory_gib": 1}'])
    assert "island hut: memory_gib 1 is too little for experts/000, experts/001" in done.stderr


def test_nothing_is_proposed_for_other_networks_or_once_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    island = Island(name="north", memory_gib=100)
    assert planning.largest_sizes(begin(tmp_path / "paper", "ddm-24b"), [island]) == []
    run = begin(tmp_path)
    monkeypatch.setattr(planning, "free_bytes", lambda: 2e9)
    (plan,) = planning.largest_sizes(run, [Island(name="here")])
    assert (plan.free, plan.size) == (2e9, "Ti"), "a single island is this machine"
    monkeypatch.setattr("ddm_ray.islands.needs.status", lambda *_: type("Status", (), {"fraction": 0.1}))
    assert planning.largest_sizes(run, [island]) == []
    (tmp_path / "islands.yaml").write_text(ISLANDS)
    done = CliRunner().invoke(cli.main, ["plan", run.url, "--islands", str(tmp_path / "islands.yaml")])
    assert done.exit_code == 1 and "names 5 islands" in done.stderr


def test_an_adapter_needs_its_base_and_a_state_of_its_own(tmp_path: Path) -> None:
    init = "expert.train.init_from={source: runs/base, network: monolith}"
    run = begin(tmp_path, "tiny", init, "expert.adapter.rank=2")
    bare = begin(tmp_path / "bare", "tiny", init)
    own, dense = (needs_of(each, [expert(0)])[0] for each in (run, bare))
    assert num_frozen(own.model) == dense.parameters > 5 * own.parameters
    for use_gpu in (False, True):
        frozen = [4 * dense.parameters] * 3 + [4 * dense.parameters / 2]
        for stage, (mine, base) in enumerate(zip(own.memory(2, use_gpu), frozen, strict=True)):
            each = bytes_a_parameter("fp32", 2, use_gpu)[stage]
            assert mine == each * own.parameters + base
    assert planning.largest_sizes(run, [Island(name="a", memory_gib=4)]) == []
