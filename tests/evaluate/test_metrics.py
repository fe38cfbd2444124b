"""The table of metrics is all that a new one has to be added to."""

import json

import pytest

from ddm_ray.evaluate import metrics
from ddm_ray.evaluate.compare import Side, compare
from ddm_ray.evaluate.compare_report import comparison_table, render_comparison
from ddm_ray.evaluate.image_set import ImageSet
from ddm_ray.evaluate.metrics import METRICS, Column, Metric, columns, measured, notes
from ddm_ray.evaluate.report import report_table
from ddm_ray.evaluate.run import evaluate, read_metrics
from ddm_ray.run.graph import evaluation
from tests.random_run import make_run

pytestmark = pytest.mark.contract

SMALL = ("evaluate.strategies=[once]", "evaluate.num_samples=20", "sample.steps=1")


def spread_over_classes(images: ImageSet) -> metrics.Values:
    return {"classes": float(len({*images.class_M.tolist()})), "classes_std": 0.5}


def test_one_entry_is_measured_stored_shown_and_explained(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    column = Column(("classes", "classes_std"), "classes seen", "{:.0f} ± {:.1f}".format, terminal="seen")
    added = Metric((column,), "Classes seen: what the classifier sees.", spread_over_classes)
    monkeypatch.setattr(metrics, "METRICS", (*METRICS, added))
    run = make_run(str(tmp_path / "run"), settings=SMALL)
    evaluate(run)
    rows = {row["model"]: row for row in [*read_metrics(run)["models"], *read_metrics(run)["real"]]}
    words = f"{rows['once']['classes']:.0f} ± 0.5"
    assert rows["real: 20 drawn again"]["classes"] is None and rows["real: 40 held out"]["classes"] == 10
    comparison = compare([Side(run, "demo", "run")])
    page = run.read(evaluation("demo"), "report.html").decode()
    for text in (page, render_comparison(comparison)):
        assert ">classes seen<" in text and words in text and "<li>Classes seen: what the classifier sees.</li>" in text
    for text in (report_table(read_metrics(run)), comparison_table(comparison)):
        assert " seen " in text and words in text
    assert json.loads(json.dumps(comparison.as_json()))["lines"][0].keys() > {"classes", "classes_std"}


def test_every_metric_has_keys_of_its_own_and_a_note() -> None:
    keys = [key for column in columns() for key in column.keys]
    assert len({*keys}) == len(keys)
    row = dict.fromkeys(keys, 0.5)
    words = notes({"num_samples": 31, "num_real": 47, "features": "its {features}", "clip": "a/clip-b"}, [row])
    assert len(words) == len(METRICS)
    assert "between 31 samples and 47 training rows, in its {features};" in words[0] and "as clip-b sees" in words[-1]
    assert {column.cell(row) for column in columns()} >= {"0.5 ± 0.5", "500.0 ± 500.0", "0.500", "0.50 ± 0.5"}
    assert all(column.cell({}) == "–" for column in columns())


def test_what_no_row_has_is_not_shown() -> None:
    """Rows of an older version lack what was measured only since."""
    row = {"frechet": 2.0, "frechet_std": 0.1, "accuracy": None}
    assert [column.key for column in measured(columns(), [row])] == ["frechet"]
    assert "cluster_tv" in {column.key for column in columns()} - {column.key for column in columns(across_runs=True)}
