"""evaluate() from a finished run to a committed report."""

import html
import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.errors import CorruptArtifact, MissingArtifact
from ddm_ray.evaluate.costs import training_cost
from ddm_ray.evaluate.report import report_table
from ddm_ray.evaluate.run import evaluate, read_metrics
from ddm_ray.run.graph import MONOLITH, ROUTER, ROWS, STUDENT, Artifact, evaluation
from ddm_ray.run.run import Run
from ddm_ray.sampling import run_models
from ddm_ray.sampling.run_models import load_trained, sampling_settings
from tests.evaluate.conftest import SETTINGS, copied
from tests.infos import commit_written, info_of
from tests.random_run import make_run, publish

pytestmark = pytest.mark.contract


def test_it_commits_samples_and_five_files(random_run: Run, evaluated: Path) -> None:
    manifest = random_run.require(evaluation("demo"))
    files = [name for name in manifest.files if not name.startswith("samples/")]
    assert sorted(files) == ["experts.png", "grid.png", "metrics.json", "mixture.png", "report.html"]
    assert manifest.info["num_samples"] == 300
    frechet = {name: distance for name, distance in manifest.info["frechet"].items() if name != "monolith"}
    assert (
        manifest.info["best_strategy"]
        == min(frechet, key=frechet.__getitem__)
        == sampling_settings(random_run).strategy
    )
    assert manifest.info["frechet"]["once"] == read_metrics(random_run)["models"][1]["frechet"]


def test_metrics_name_every_model_and_its_cost(random_run: Run, evaluated: Path) -> None:
    metrics = read_metrics(random_run)
    rows = {row["model"]: row for row in metrics["models"]}
    assert list(rows) == ["monolith", "once", "full", "top-1", "top-2"]
    assert {name: row["expert_rows_per_image"] for name, row in rows.items()} == {
        "monolith": 4,
        "once": 4,
        "full": 8,
        "top-1": 4,
        "top-2": 8,
    }
    assert [row["router_rows_per_image"] for row in rows.values()] == [0, 0, 4, 4, 4]
    for row in rows.values():
        assert row["n"] == metrics["num_samples"] == 300
        assert row["frechet"] > metrics["real"][0]["frechet"] > 0
        assert row["seconds_per_image"] > 0
        assert 0 <= row["cluster_tv"] <= 1
    reals = [row["model"] for row in metrics["real"]]
    assert reals == [
        "real: 300 drawn again",
        "real: 40 drawn again",
        "real: 40 held out",
        "mosaics of real rows",
        "noise",
    ]
    assert (metrics["num_real"], metrics["num_heldout"], metrics["seed"]) == (360, 40, 0)
    assert metrics["sampling"] == {
        "steps": 4,
        "times": "uniform",
        "solver": "ab2",
        "guidance_scale": 1.0,
        "guidance_interval": [0.0, 1.0],
        "guidance_kind": "mixture",
        "router_temperature": 1.0,
    }
    assert set(metrics["versions"]) == {"ddm_ray", "torch", "numpy", "python"}
    assert [row["model"] for row in metrics["heldout_loss"]] == ["monolith", "full", "top-1", "top-2", "own cluster"]


def test_all_strategies_share_labels_and_seeds(random_run: Run, evaluated: Path) -> None:
    """top-2 of two experts asks for the same velocities as full does."""
    full, top_2 = read_metrics(random_run)["models"][2::2]
    for key in ("accuracy", "precision", "recall", "cluster_tv"):
        assert top_2[key] == full[key]
    assert top_2["frechet"] == pytest.approx(full["frechet"], rel=1e-4)


def test_experts_cost_what_the_monolith_costs(random_run: Run) -> None:
    cost = training_cost(random_run, (), {})
    assert [job.job for job in cost.jobs] == ["experts/000", "experts/001", "router", "monolith"]
    assert cost.experts_over_monolith == 1
    jobs = {job.job: job for job in cost.jobs}
    assert cost.experts_flops == jobs["experts/000"].flops + jobs["experts/001"].flops
    assert cost.router_over_experts == jobs["router"].flops / cost.experts_flops
    assert 0 < cost.router_over_experts < 1


def test_progress_rises_to_one(evaluated: Path, progress_notes: list[tuple[float, str]]) -> None:
    shares = [share for share, _ in progress_notes]
    assert all(after > before - 1e-9 for before, after in pairwise(shares))
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert any("full" in note for _, note in progress_notes)


def test_a_second_call_does_nothing(random_run: Run, evaluated: Path) -> None:
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in evaluated.rglob("*.*") if path.is_file()}
    shares: list[float] = []
    manifest = evaluate(random_run, on_progress=lambda share, note: shares.append(share))
    assert manifest == random_run.require(evaluation("demo"))
    assert shares == []
    assert before == {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in evaluated.rglob("*.*") if path.is_file()
    }


def test_the_same_run_gives_the_same_metrics(random_run: Run, evaluated: Path, tmp_path: Path) -> None:
    run = copied(random_run, tmp_path / "run")
    evaluate(run, name="again")
    first, second = read_metrics(random_run), read_metrics(run, "again")
    for row in [*first["models"], *second["models"]]:
        del row["seconds_per_image"]
    assert json.dumps(first | {"name": "again"}) == json.dumps(second)


def test_networks_in_bf16_as_on_a_gpu_are_measured_near_to_those_in_fp32(
    random_run: Run, evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_models, "frozen_dtype", lambda device: torch.bfloat16)
    run = copied(random_run, tmp_path / "run")
    evaluate(run, name="half")
    for table, field in (("models", "frechet"), ("heldout_loss", "loss")):
        full, half = (
            {row["model"]: row[field] for row in read_metrics(*of)[table]} for of in ((random_run,), (run, "half"))
        )
        assert half == pytest.approx(full, rel=0.02)
        assert all(half[name] != full[name] for name in full)


def test_what_is_there_is_measured_and_what_is_missing_is_said(random_run: Run, tmp_path: Path) -> None:
    run = copied(random_run, tmp_path / "run")
    publish(run, STUDENT, load_trained(run, MONOLITH), 3, 4)
    for artifact in (MONOLITH, ROUTER):
        (tmp_path / "run" / artifact).rename(tmp_path / artifact)
    evaluate(run)
    metrics, before = read_metrics(run), read_metrics(random_run)
    rows = {row["model"]: row for row in metrics["models"]}
    assert list(rows) == ["student", "once"] and [*metrics["missing"]] == ["router", "monolith"]
    assert rows["student"]["frechet"] == before["models"][0]["frechet"]
    assert [loss["model"] for loss in metrics["heldout_loss"]] == ["student", "own cluster"]
    assert metrics["heldout_loss"][1] == before["heldout_loss"][-1] and metrics["router"] is None
    training = metrics["training"]
    assert [job["job"] for job in training["jobs"]] == ["experts/000", "experts/001", "student"]
    assert (training["experts_over_monolith"], training["router_over_experts"]) == (None, None)
    page, text = (tmp_path / "run/eval/demo/report.html").read_text(), report_table(metrics)
    for line in ("full, top-1, top-2 (there is no trained router)", "monolith (it isn&#39;t trained)"):
        assert f"Not measured: {line}." in page and f"Not measured: {html.unescape(line)}." in text
    assert "beside the monolith" not in page
    (tmp_path / MONOLITH).rename(tmp_path / "run" / MONOLITH)
    again = CliRunner().invoke(main, ["evaluate", run.url, "--name", "demo"])
    assert again.exit_code == 0 and "warning: monolith: finished since" in again.stderr
    assert run.require(evaluation("demo")).identity.inputs.keys() == {"experts/000", "experts/001", "student"}
    early = info_of(evaluation("early"), num_samples=2, frechet={"top-1": 1.0}, best_strategy="top-1")
    run.store.delete(evaluation("demo"))
    commit_written(run, evaluation("early"), [], early)
    assert sampling_settings(run).strategy == "top-1"
    (tmp_path / ROUTER).rename(tmp_path / "run" / ROUTER)
    assert sampling_settings(run).strategy == "once", "an evaluation without the router no longer says what is best"


def test_a_student_of_other_experts_is_named_and_the_rest_measured(tmp_path: Path) -> None:
    settings = ("evaluate.num_samples=20", "sample.steps=1", "evaluate.strategies=[once]")
    run = make_run(str(tmp_path / "run"), settings=settings, num_rows=100)
    publish(run, STUDENT, load_trained(run, MONOLITH), 3, 4)
    other = load_trained(run, Artifact("experts/000"))
    run.store.delete(Artifact("experts/001"))
    publish(run, Artifact("experts/001"), other, 300, 16)
    done = CliRunner().invoke(main, ["evaluate", run.url, "--name", "demo"])
    assert done.exit_code == 0, done.output
    metrics = read_metrics(run)
    assert [row["model"] for row in metrics["models"]] == ["monolith", "once"]
    assert [*metrics["missing"]] == ["student"]
    assert "student was made otherwise: input experts/001: " in metrics["missing"]["student"]
    assert "Not measured: student" in done.output and "finished since" not in done.stderr
    assert "student" not in [job["job"] for job in metrics["training"]["jobs"]]
    run.store.delete(STUDENT)
    publish(run, STUDENT, load_trained(run, MONOLITH), 3, 4)
    again = CliRunner().invoke(main, ["evaluate", run.url, "--name", "demo"])
    assert again.exit_code == 0 and "warning: student: finished since" in again.stderr


def test_a_guided_students_loss_is_not_set_beside_others(tmp_path: Path) -> None:
    settings = (
        "student.guidance_scale=2.0",
        "evaluate.num_samples=20",
        "sample.steps=1",
        "sample.guidance_scale=2",
    )
    run = make_run(str(tmp_path / "run"), settings=(*settings, "expert.train.condition_dropout=0.1"), num_rows=100)
    publish(run, STUDENT, load_trained(run, MONOLITH), 3, 4)
    evaluate(run)
    metrics = read_metrics(run)
    rows = {row["model"]: row for row in metrics["models"]}
    assert (rows["monolith"]["expert_rows_per_image"], rows["student"]["expert_rows_per_image"]) == (2, 1)
    assert "student" not in [loss["model"] for loss in metrics["heldout_loss"]]


def test_a_run_of_owners_who_pool_nothing_is_evaluated(tmp_path: Path) -> None:
    settings = (*SETTINGS[1:], "partition.method=given", "evaluate.strategies=[once, top-1]")
    run = make_run(str(tmp_path / "run"), settings=settings)
    for artifact in (MONOLITH, ROUTER, ROWS):
        shutil.rmtree(tmp_path / "run" / artifact)
    evaluate(run)
    metrics = read_metrics(run)
    assert [row["model"] for row in metrics["models"]] == ["once"] and [*metrics["missing"]] == ["router"]
    assert [loss["model"] for loss in metrics["heldout_loss"]] == ["own cluster"]


def test_with_nothing_to_measure_it_is_said(random_run: Run, tmp_path: Path) -> None:
    settings = ("evaluate.strategies=[top-1]", "evaluate.num_samples=20")
    run = make_run(str(tmp_path / "run"), settings=settings, num_rows=9)
    for artifact in (MONOLITH, ROUTER):
        shutil.rmtree(tmp_path / "run" / artifact)
    with pytest.raises(
        MissingArtifact, match=r"nothing to measure: top-1 \(there is no trained router\); monolith .*;"
    ):
        evaluate(run)
    assert not (tmp_path / "run" / "eval").exists()


def test_an_altered_shard_is_named(random_run: Run, tmp_path: Path) -> None:
    run = copied(random_run, tmp_path / "run")
    path = tmp_path / "run" / "partition" / "shards" / "cluster=001" / "train-00000.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptArtifact, match=r"cluster=001/train-00000\.parquet"):
        evaluate(run)


def test_without_held_out_rows_there_are_no_held_out_losses(tmp_path: Path) -> None:
    settings = ("evaluate.strategies=[]", "evaluate.num_samples=20", "sample.steps=1")
    run = make_run(str(tmp_path / "run"), settings=settings, num_rows=9)
    evaluate(run)
    metrics = read_metrics(run)
    assert metrics["num_heldout"] == 0
    assert metrics["heldout_loss"] == []
    assert [row["model"] for row in metrics["models"]] == ["monolith"]
    assert [row["model"] for row in metrics["real"]] == ["real: 20 drawn again", "mosaics of real rows", "noise"]


def test_the_best_strategy_is_the_runs_until_an_expert_is_another(random_run: Run, evaluated: Path, tmp_path) -> None:
    shutil.copytree(random_run.url, tmp_path / "run")
    run = Run.open(str(tmp_path / "run"))
    info = json.loads((tmp_path / "run/eval/demo/_MANIFEST.json").read_text())["info"]
    best = max(info["frechet"].keys() - {"monolith"}, key=info["frechet"].__getitem__)
    run.store.delete(evaluation("demo"))
    assert sampling_settings(run).strategy == "once"
    run.store.write(f"{evaluation('other')}/metrics.json", b"{}")
    commit_written(
        run, evaluation("other"), ["metrics.json"], info_of(evaluation("other"), **{**info, "best_strategy": best})
    )
    assert sampling_settings(run).strategy == best != "once"
    retrained = load_trained(run, Artifact("experts/000"))
    run.store.delete("experts/001")
    publish(run, Artifact("experts/001"), retrained, 300, 16)
    assert sampling_settings(run).strategy == "once"
