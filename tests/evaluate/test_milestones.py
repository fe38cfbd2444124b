"""Evaluations of runs in the middle of training: by what was published last, whatever is published meanwhile."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ddm_ray.cli import main
from ddm_ray.data.sharded.serial import serial
from ddm_ray.errors import CorruptArtifact, MissingArtifact
from ddm_ray.evaluate.candidates import newest_milestones
from ddm_ray.evaluate.compare import Side, compare
from ddm_ray.evaluate.report import milestones_in_words, report_table
from ddm_ray.evaluate.run import evaluate, read_metrics
from ddm_ray.jobs.attempts import claim
from ddm_ray.jobs.published import Weights
from ddm_ray.models import weights
from ddm_ray.run.graph import MONOLITH, ROUTER, Artifact, evaluation, expert
from ddm_ray.run.run import Run
from ddm_ray.sampling.run_models import load_models, load_trained, sampling_settings
from ddm_ray.train.job import train_job
from tests.published import publish_weights
from tests.random_run import make_run, publish

pytestmark = pytest.mark.contract

SETTINGS = ("evaluate.num_samples=20", "sample.steps=2", "evaluate.strategies=[once, top-1]")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A finished run."""
    return make_run(str(tmp_path / "run"), settings=SETTINGS, num_rows=100)


def on_its_way(run: Run, artifact: Artifact, *steps: int) -> list[Weights]:
    """Milestones of an artifact that still trains from now on: its own weights, and smaller ones for each earlier."""
    model = load_trained(run, artifact) if run.manifest(artifact) else load_trained(run, expert(0))
    run.store.delete(artifact)
    attempt, published = claim(run.store, artifact), []
    for step in steps:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        tensors, spec = weights.weights_as_bytes(model, weights.spec_of_model(model))
        parts = {"ema.safetensors": tensors, "model.json": spec.encode()}
        prefix, _ = publish_weights(attempt, step, run.identity(artifact), parts)
        published.append(Weights(artifact, prefix, step, final=False, run=run.url))
    return published


def ended_after_one(*work: Any) -> Iterator[Any]:
    """An executor whose process is killed after its first chunk."""
    yield next(iter(serial(*work)))
    raise KeyboardInterrupt


def test_what_still_trains_is_measured_by_its_newest_milestone(run: Run) -> None:
    _, newest = on_its_way(run, expert(1), 100, 200)
    (router,) = on_its_way(run, ROUTER, 50)
    assert newest_milestones(run) == {expert(1): newest, ROUTER: router}
    evaluate(run)
    metrics = read_metrics(run)
    assert [row["model"] for row in metrics["models"]] == ["monolith", "once", "top-1"]
    steps = {"experts/001": 200, "router": 50}
    assert {name: each["step"] for name, each in metrics["milestones"].items()} == steps
    costs = {job["job"]: job for job in metrics["training"]["jobs"]}
    job = train_job(run, expert(1))
    assert costs["experts/001"]["flops"] == job.training_flops(200) and costs["experts/001"]["seconds"] is None
    assert costs["experts/001"]["parameters"] == costs["experts/000"]["parameters"]
    sentence = (
        f"Models that were still training, measured by a milestone: {milestones_in_words(metrics['milestones'])}."
    )
    assert sentence in " ".join(report_table(metrics).split()).replace("- ", "-")
    assert sentence in run.read(evaluation("demo"), "report.html").decode()
    assert run.require(evaluation("demo")).identity.inputs.keys() == {"experts/000", "monolith"}
    assert sampling_settings(run).strategy == "once", (
        "the best strategy of unfinished models isn't that of finished ones"
    )


def test_killed_it_goes_on_by_the_milestones_that_it_was_begun_with(run: Run, tmp_path: Path) -> None:
    on_its_way(run, expert(1), 100)
    shutil.copytree(run.url, tmp_path / "quiet")
    quiet = Run.open(str(tmp_path / "quiet"))
    evaluate(quiet)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, execute=ended_after_one)
    publish(run, expert(1), load_trained(run, expert(0)), 300, 16)
    evaluate(run, execute=serial)  # by models that it loads anew
    ours, theirs = read_metrics(run), read_metrics(quiet)
    assert ours["milestones"] == theirs["milestones"] == {"experts/001": {"step": 100, "of": 300}}
    assert [row["frechet"] for row in ours["models"]] == [row["frechet"] for row in theirs["models"]]
    shown = CliRunner().invoke(main, ["evaluate", run.url, "--name", "demo"])
    assert shown.exit_code == 0 and "warning: experts/001: measured by earlier weights" in shown.stderr
    with pytest.raises(KeyboardInterrupt):
        evaluate(quiet, "later", execute=ended_after_one)
    for path in (tmp_path / "quiet" / expert(1)).rglob("ema.safetensors"):
        path.unlink()
    with pytest.raises(CorruptArtifact, match="step-000000100: not whole any more"):
        evaluate(quiet, "later")


def test_an_expert_without_any_weights_is_asked_for(run: Run) -> None:
    run.store.delete(expert(1))
    with pytest.raises(MissingArtifact, match="no finished experts/001 yet"):
        evaluate(run)
    assert not run.store.exists("eval")


def test_how_a_run_came_on(run: Run) -> None:
    """Weights of a step, also of what has finished, and their lines over FLOPs."""
    for artifact in (*run.experts, MONOLITH):
        early = on_its_way(run, artifact, 100)[0]
        publish(run, artifact, load_models(run, milestones={artifact: early, **_all(run, early)}).experts[0], 300, 16)
    evaluate(run, "early", at=150)
    metrics = read_metrics(run, "early")
    assert {each["step"] for each in metrics["milestones"].values()} == {100}
    assert metrics["missing"] == {
        "router": "router (there are no weights of it after 150 steps or fewer)",
        "student": "student (it isn't trained)",
    }
    assert "router" not in {job["job"] for job in metrics["training"]["jobs"]}
    evaluate(run, "late")
    assert not read_metrics(run, "late")["milestones"]
    lines = {line["model"]: line for line in compare([Side(run, "early", "early"), Side(run, "late", "late")]).lines}
    early_flops, late_flops = (lines[f"{name}: once"]["training_flops"] for name in ("early", "late"))
    assert early_flops == sum(train_job(run, artifact).training_flops(100) for artifact in run.experts) < late_flops
    with pytest.raises(MissingArtifact, match="no weights of experts/000 after 50 steps or fewer"):
        evaluate(run, "before", at=50)


def _all(run: Run, weights: Weights) -> dict[Artifact, Weights]:
    """The same weights for every expert."""
    return dict.fromkeys(run.experts, weights)
