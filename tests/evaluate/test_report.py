"""The report says what the numbers say."""

import json
from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ddm_ray.evaluate.controls import marked
from ddm_ray.evaluate.curves import POINTS, Curve
from ddm_ray.evaluate.report import findings, render_report, report_table

pytestmark = pytest.mark.contract

PICTURES = dict.fromkeys(("mixture.png", "grid.png", "experts.png"), b"")
VOID = {"meta", "img", "br"}


@pytest.fixture
def metrics(evaluated: Path) -> dict[str, Any]:
    return json.loads((evaluated / "metrics.json").read_text())


def with_distances(metrics: dict[str, Any], **distances: float) -> dict[str, Any]:
    changed = deepcopy(metrics)
    changed["models"] = [row for row in changed["models"] if row["model"] in distances]
    for row in changed["models"]:
        row |= {"frechet": distances[row["model"]], "frechet_std": 0.3}
    for row in changed["differences"]:
        difference = distances.get(row["model"], 0) - distances.get(row["against"], 0)
        row |= {"frechet": difference, "low": difference - 0.75, "high": difference + 0.75}
    changed["real"] = [row | {"frechet": 100.0, "precision": None} for row in changed["real"]]
    good = {"kid": 0.001, "accuracy": 0.9, "recall": 0.9, "density": 1.0, "coverage": 1.0, "copied": 0.5}
    heldout, mosaics, noise = changed["real"][-3:]
    heldout |= good | {"precision": 0.9, "cluster_tv": 0.1}
    mosaics |= good | {"precision": 0.4, "density": 0.7, "coverage": 0.7}
    noise |= dict.fromkeys(good, 0.0) | {"kid": 0.1, "precision": 0.0, "cluster_tv": 0.3, "frechet": 1000.0}
    return changed


def test_sentences_follow_the_numbers(metrics: dict[str, Any]) -> None:
    lowest, compared, missing, caution = findings(with_distances(metrics, monolith=2.0, once=1.5, full=3.0))
    assert lowest == "Lowest Fréchet distance: once (1.5)."
    assert "once, is 25% below the monolith's 2; the difference is -0.5," in compared
    assert "between -1.2 and +0.25 (95%), which other seeds might reverse." in compared
    assert missing == "Not measured: student (it isn't trained)." and "one seed" in caution
    lowest, compared, *_ = findings(with_distances(metrics, monolith=2.0, once=4.0, full=3.0))
    assert lowest == "Lowest Fréchet distance: monolith (2)."
    assert "full, is 50% above the monolith's 2; the difference is +1," in compared
    assert compared.endswith("between +0.25 and +1.8 (95%), more than the luck of the seeds.")


def test_a_student_is_compared_with_the_monolith_or_with_the_mixture(metrics: dict[str, Any]) -> None:
    pairs = [{"model": "student", "against": other} for other in ("monolith", "once")]
    metrics = metrics | {
        "models": [{"model": "student"}, *metrics["models"]],
        "differences": [*metrics["differences"], *pairs],
    }
    _, _, student, *_ = findings(with_distances(metrics, student=3.0, monolith=2.0, once=1.5))
    assert student.startswith("The student is 50% above the monolith's 2; the difference is +1, between")
    _, student, *_ = findings(with_distances(metrics, student=3.0, once=6.0, full=8.0))
    assert student.startswith("The student is 50% below that of once, 6; the difference is -3, between")


def test_what_paints_like_mosaics_is_far_and_what_takes_them_for_real_is_blind(metrics: dict[str, Any]) -> None:
    metrics = with_distances(metrics, monolith=49.0, once=51.0)
    assert not [line for line in findings(metrics) if "monolith is far" in line or "can't tell" in line]
    (line,) = (line for line in findings(metrics) if "is far" in line)
    assert line == "once is far from real rows: its distance is 51% of that of mosaics, each of four real rows (100)."
    metrics["real"][-2]["precision"] = 0.73
    assert "Precision can't tell here: mosaics have 0.730, held-out real rows 0.900." in findings(metrics)


def test_what_paints_like_noise_comes_first_and_what_takes_it_for_real_is_marked(metrics: dict[str, Any]) -> None:
    metrics = with_distances(metrics, monolith=499.0, once=501.0)
    first, *others = findings(metrics)
    assert first == "Nothing was learnt, or too little: once has 50% of noise's distance."
    assert not any("once is far" in line or "can't tell" in line for line in others)
    blind = {"kid": 0.0011, "accuracy": 0.8, "recall": 1.0, "coverage": 0.9, "copied": 0.6, "cluster_tv": 0.11}
    metrics["real"][-1] |= blind
    words = [line for line in findings(metrics) if "can't tell here: noise has" in line]
    assert [line.split(" can't")[0] for line in words] == [
        "KID ×1000",
        "Accuracy",
        "Recall",
        "Coverage",
        "Copied",
        "Cluster TV",
    ]
    rows = {row["model"]: row for row in [*metrics["models"], *metrics["real"]]}
    for column in marked(metrics):
        assert column.cell(rows["once"]).endswith("?") == (column.key in blind)
        assert not column.cell(rows["noise"]).endswith("?")
    lines = {line.split()[0]: line for line in report_table(metrics).splitlines() if line.strip()}
    assert "?" in lines["once"] and "?" not in lines["noise"]


def test_what_is_many_times_as_far_as_held_out_rows_is_far(metrics: dict[str, Any]) -> None:
    """Whatever mosaics are: samples right in .56 were once 24 times as far as held-out rows, without a word."""
    metrics = with_distances(metrics, monolith=4.9, once=24.0)
    heldout = next(row for row in metrics["real"] if row["model"].endswith("held out"))
    heldout["frechet"] = 1.0
    words = [line for line in findings(metrics) if "is far from real rows: its" in line]
    assert words == ["once is far from real rows: its distance is 24 times that of held-out real rows (1)."]
    metrics = with_distances(metrics, monolith=5.1, once=74.0)
    next(row for row in metrics["real"] if row["model"].endswith("held out"))["frechet"] = 1.0
    words = [line for line in findings(metrics) if "is far from real rows: its" in line]
    assert words == [
        "monolith is far from real rows: its distance is 5 times that of held-out real rows (1).",
        "once is far from real rows: its distance is 74% of that of mosaics, each of four real rows (100) and 74 times"
        " that of held-out real rows (1).",
    ]
    assert not [line for line in findings(metrics | {"real": metrics["real"][:1]}) if "is far" in line]


def test_curves_of_experts_are_their_mean_where_all_have_come_to() -> None:
    long = Curve([2, 4, 6], [3.0, 2.0, 1.0], [3, 6], [2.0, 1.0])
    short = Curve([2, 4], [5.0, 4.0], [3], [4.0])
    assert Curve.mean([long, short]) == Curve([2, 4, 6], [4.0, 3.0, 1.0], [3, 6], [3.0, 1.0])
    losses = [float(step) for step in range(1000)]
    thinned = Curve.of({"loss": losses})
    assert len(thinned.steps) <= POINTS and thinned.steps[-1] == 1000
    first = int(thinned.steps[0])
    assert thinned.losses[0] == pytest.approx(sum(losses[:first]) / first)
    assert (thinned.heldout_steps, thinned.heldout) == ([], [])


def test_table_for_the_terminal(metrics: dict[str, Any]) -> None:
    text = report_table(metrics)
    assert max(len(line) for line in text.splitlines()) <= 100
    for row in metrics["models"]:
        line = next(line for line in text.splitlines() if line.startswith(f" {row['model']} "))
        assert f"{row['accuracy']:.3f}" in line
        assert f"{row['frechet']:.3g} ±" in line
    assert "1.000 times the monolith's" in text


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_and_holds_its_pictures(evaluated: Path) -> None:
    page = Balanced()
    page.feed((evaluated / "report.html").read_text())
    assert set(page.open) <= {"html"}
    assert len(page.sources) == 7
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)


def test_the_page_leaves_out_what_was_not_measured(metrics: dict[str, Any]) -> None:
    titles = {"curves": "<h2>Training curves</h2>", "router": "<h2>The router</h2>", "heldout_loss": "Held-out loss"}
    whole_page = render_report(metrics, PICTURES)
    for field, title in titles.items():
        assert title in whole_page and title not in render_report(metrics | {field: type(metrics[field])()}, PICTURES)
    older = {key: value for key, value in metrics.items() if key != "curves"}
    assert "Training curves" not in render_report(older | {"real": metrics["real"][:1]}, PICTURES)


def test_page_marks_the_lowest_distance_and_escapes_names(metrics: dict[str, Any]) -> None:
    metrics = with_distances(metrics, monolith=2.0, once=1.5) | {"run": "<b>run</b>"}
    page = render_report(metrics, PICTURES)
    assert page.count('class="best"') == 1
    assert 'class="best">1.5 ± 0.3<' in page
    assert "<b>run" not in page
