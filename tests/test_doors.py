"""The doors for `ray job submit`, on an island's real Ray cluster."""

import json
import re
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from ddm_ray.cli import main
from ddm_ray.jobs.attempts import Attempt
from ddm_ray.run.graph import PARTITION, ROUTER, ROWS, Artifact, evaluation
from ddm_ray.run.run import Run
from tests.conftest import ROOT, SUBMIT, Island, submit
from tests.page_blocks import commands_of
from tests.random_run import make_data, make_run
from tests.train.conftest import SHORT

pytestmark = pytest.mark.integration

STEPS = 60
SETTINGS = ("--set", f"expert.train.steps={STEPS}", "--set", f"router.train.steps={STEPS}")


@pytest.fixture(scope="module")
def island_run(island: Island, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Recipe tiny through the doors as far as two islands go: expert 0 and the router are trained."""
    url = str(tmp_path_factory.mktemp("doors") / "run")
    assert CliRunner().invoke(main, ["init", url, "--recipe", "tiny", *SETTINGS]).exit_code == 0
    submit(island, "prepare", url)
    submit(island, "partition", url)
    jobs = [("expert", "0"), ("router",)]
    # The file of another island, in which nobody would train: a job stays where it was submitted to.
    islands = tmp_path_factory.mktemp("elsewhere") / "islands.yaml"
    other = "address: '127.0.0.1:1', jobs: 'http://127.0.0.1:2', token_file: /nowhere/token"
    islands.write_text(f"islands: {{north: {{{other}, resources_per_worker: {{CPU: 0.5}}, checkpoint_steps: 50}}}}")
    with ThreadPoolExecutor(len(jobs)) as pool:
        placed = ("--islands", str(islands), "--island", "north")
        list(pool.map(lambda job: submit(island, "train", url, *job, *placed), jobs))
    return Run.open(url)


@pytest.mark.chaos
def test_stages_through_their_doors(island_run: Run) -> None:
    for artifact in (ROWS, PARTITION, Artifact("experts/000"), ROUTER):
        assert island_run.finished(artifact), artifact
    assert island_run.require(Artifact("experts/000")).info["rows_seen"] == STEPS * 16
    assert island_run.manifest(Artifact("experts/001")) is None
    claim_fields = Attempt(island_run.store, ROUTER, 1).claim()
    assert claim_fields["island"] == "north" and claim_fields["job"].startswith("raysubmit_")


def test_the_pages_line_is_the_one_that_trained_an_expert_here() -> None:
    """But for the island's address, which RAY_ADDRESS may say, and the file of islands."""
    (line,) = commands_of("howto/machines.md", "ray job submit --working-dir")
    assert line == f"{SUBMIT} -- python jobs/train.py RUN expert 0"


@pytest.mark.chaos
def test_sample_and_evaluate_through_their_doors(island: Island, tmp_path: Path) -> None:
    run, picture = make_run(str(tmp_path / "run"), num_rows=200), tmp_path / "it.png"
    with ThreadPoolExecutor(2) as pool:
        sampled = pool.submit(submit, island, "sample", run.url, "--class", "3", "-o", str(picture))
        submit(island, "evaluate", run.url)
        sampled.result()
    with Image.open(picture) as image:
        assert len(set(image.convert("L").tobytes())) > 20
    metrics = json.loads(run.read(evaluation("default"), "metrics.json"))
    assert {row["model"] for row in metrics["models"]} == {"monolith", "once", "full", "top-1"}


@pytest.mark.chaos
def test_an_island_works_through_its_door(island: Island, tmp_path: Path) -> None:
    """On the cluster that it was submitted to, until what it is to train is finished."""
    run = make_data(str(tmp_path / "run"), settings=SHORT, num_rows=60)
    output = submit(island, "work", run.url, "--island", "north", "--only", "expert:1", "--only", "router")
    assert "north: " in output
    for artifact in (Artifact("experts/001"), ROUTER):
        assert run.finished(artifact)
        claim_fields = Attempt(run.store, artifact, 1).claim()
        assert claim_fields["island"] == "north" and claim_fields["job"].startswith("raysubmit_")
    assert run.manifest(Artifact("experts/000")) is None


@pytest.mark.parametrize("door", sorted(path.stem for path in (ROOT / "jobs").glob("*.py")))
def test_a_door_opens_on_the_verb_of_its_name(
    door: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [door, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / f"jobs/{door}.py"), run_name="__main__")
    assert f"{door} [OPTIONS] RUN" in capsys.readouterr().out


def test_a_submitted_job_refuses_a_relative_run(island: Island) -> None:
    with pytest.raises(AssertionError, match=r"error: RUN 'runs/x' is relative; a submitted job needs"):
        submit(island, "prepare", "runs/x")


@pytest.mark.chaos
def test_status_reads_storage_alone(island_run: Run) -> None:
    shown = CliRunner().invoke(main, ["status", island_run.url, "--long"])
    assert shown.exit_code == 0
    assert f"experts/000      finished  100%  {STEPS} steps, loss" in shown.output
    assert re.search(r"experts/001 +waiting +0%", shown.output)
