"""Credits for pictures of others stand wherever what was learnt from them is shown."""

from pathlib import Path

import pytest

from ddm_ray.data.partition.stage import partition
from ddm_ray.evaluate.report import findings
from ddm_ray.evaluate.run import evaluate, read_metrics
from ddm_ray.run.graph import REPORT, ROWS
from ddm_ray.run.manifest import NAME
from ddm_ray.run.run import Run
from ddm_ray.sampling.card import model_card
from ddm_ray.serve.http.responses import model_entry
from tests.data.rows import commit_rows
from tests.random_run import make_run

pytestmark = pytest.mark.contract

CREDIT = "Pictures by Ada, CC BY 4.0."


def test_whoever_shows_samples_credits_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "credit", CREDIT)
    settings = ("evaluate={num_samples: 8, strategies: [once]}", "sample.steps=2")
    run = make_run(str(tmp_path / "run"), num_rows=60, settings=settings)
    evaluate(run, "one")
    shown = {
        "card": model_card(run, "monolith"),
        "evaluation": " ".join(findings(read_metrics(run, "one"))),
        "server": str(model_entry("emoji", run.config, run.credit, (0, 1), run.config.sample)["credit"]),
    }
    assert [name for name, text in shown.items() if CREDIT not in text] == []


def test_rows_and_the_report_of_their_partition_have_the_credit_of_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a source without one have the bytes that they had before there were any."""
    settings = ("data.source=shapes:60", "data.num_classes=12", "embedder.dim=2", "partition.num_fine=2")
    without = commit_rows(str(tmp_path / "without"), settings)
    assert without.credit is None and b"credit" not in without.store.read(f"{ROWS}/{NAME}")
    monkeypatch.setattr("ddm_ray.data.sources.shapes.Shapes.credit", CREDIT)
    run = commit_rows(str(tmp_path / "run"), settings)
    assert run.credit == CREDIT
    partition(run)
    assert CREDIT in run.read(REPORT, "report.html").decode()
    monkeypatch.undo()
    assert Run.open(run.url).credit == CREDIT, "also where the source isn't installed"
