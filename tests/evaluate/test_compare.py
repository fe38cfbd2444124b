"""Evaluations side by side: the figures are those of each, and a difference is one of pairs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ddm_ray.cli import main
from ddm_ray.errors import SamplingError
from ddm_ray.evaluate.compare import Comparison, Side, compare
from ddm_ray.evaluate.compare_report import comparison_findings, comparison_table, render_comparison
from ddm_ray.evaluate.distances import Gaussian
from ddm_ray.evaluate.metrics import Difference, deviation
from ddm_ray.evaluate.run import evaluate, read_metrics
from ddm_ray.run.graph import evaluation
from ddm_ray.run.run import Run
from tests.evaluate.conftest import SETTINGS
from tests.evaluate.test_report import Balanced
from tests.infos import commit_written, info_of
from tests.random_run import make_run

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the same data, whose models are others and whose evaluation has fewer samples of other steps."""
    settings = (SETTINGS[0], "evaluate.num_samples=280", "sample.steps=3")
    run = make_run(str(tmp_path_factory.mktemp("other") / "second"), settings=settings, spread=0.2)
    evaluate(run, "few")
    return run


@pytest.fixture(scope="module")
def both(random_run: Run, evaluated: Path, other: Run) -> Comparison:
    return compare([Side(random_run, "demo", "first"), Side(other, "few", "second")], ["once", "monolith"])


def test_one_run_has_the_figures_of_its_evaluation(random_run: Run, evaluated: Path) -> None:
    notes: list[float] = []
    comparison = compare([Side(random_run, "demo", "demo")], on_progress=lambda share, _: notes.append(share))
    metrics = read_metrics(random_run)
    lines = [{key: value for key, value in line.items() if key != "training_flops"} for line in comparison.lines]
    assert lines == metrics["models"]
    against = [each for each in metrics["differences"] if each["against"] == "monolith"]
    assert comparison.as_json()["differences"] == against and len(against) == 4
    assert comparison.paired == [line["model"] for line in comparison.lines]
    jobs = {job["job"]: job["flops"] for job in metrics["training"]["jobs"]}
    experts = jobs["experts/000"] + jobs["experts/001"]
    assert [line["training_flops"] for line in comparison.lines] == [
        jobs["monolith"],
        experts,
        *3 * [experts + jobs["router"]],
    ]
    assert notes == sorted(notes) and notes[0] == 0


def test_two_runs_are_measured_by_one_reference_at_equal_numbers(both: Comparison, other: Run) -> None:
    assert [line["model"] for line in both.lines] == [
        "first: once",
        "second: once",
        "first: monolith",
        "second: monolith",
    ]
    assert both.num_samples == 280 and {line["n"] for line in both.lines} == {280}
    own = {row["model"]: row["frechet"] for row in read_metrics(other, "few")["models"]}
    # The real rows are the same, and so is the classifier that they make.
    assert both.lines[1]["frechet"] == own["once"] and both.lines[3]["frechet"] == own["monolith"]
    assert both.paired == [line["model"] for line in both.lines]
    assert "They were sampled with different steps." in comparison_findings(both)
    page = Balanced()
    page.feed(text := render_comparison(both))
    assert set(page.open) <= {"html"} and len(page.sources) == 2 and ">steps</th>" in text
    assert max(len(line) for line in comparison_table(both).splitlines()) <= 100


def test_what_is_not_paired_is_marked(both: Comparison) -> None:
    unpaired = replace(both, paired=["first: once"])
    marked = [line for line in comparison_findings(unpaired) if "(other labels or seeds: not paired)" in line]
    assert len(marked) == 3 and not any("not paired" in line for line in comparison_findings(both))


def test_pairs_know_a_difference_that_two_errors_would_hide() -> None:
    """Samples of another model that are shifted alike: far less uncertain than the two distances by themselves."""
    random = np.random.default_rng(0)
    real, samples = random.normal(size=(500, 3)), random.normal(size=(400, 3))
    gaussian = Gaussian.of(real)
    pulls = [gaussian.measure(rows)[1] for rows in (samples + 1, samples + 1.02)]
    paired, apart = deviation(pulls[1] - pulls[0]), np.hypot(*(deviation(pull_M) for pull_M in pulls))
    assert paired < apart / 10
    _, other_seed = gaussian.measure(samples[::-1] + 1.02)
    assert deviation(other_seed - pulls[0]) == pytest.approx(apart, rel=0.3)


def test_an_interval_covers_the_estimate_and_no_difference_where_there_is_none() -> None:
    """Two models as far from the real rows, one of more variety."""
    random, covered = np.random.default_rng(3), 0
    gaussian = Gaussian(np.zeros(12), np.eye(12), np.eye(12))
    for _ in range(40):
        wide, narrow = (scale * random.normal(size=(300, 12)) for scale in (1.1, 0.9))
        difference = Difference.of(("wide", "narrow"), *(gaussian.measure(rows) for rows in (wide, narrow)))
        assert difference.low < difference.frechet < difference.high
        covered += difference.low <= 0 <= difference.high
    assert covered >= 36


def test_runs_of_other_data_and_too_few_models_are_refused(random_run: Run, evaluated: Path, tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), settings=("evaluate.num_samples=20", "data.heldout=0.2", "sample.steps=1"))
    evaluate(run)
    with pytest.raises(SamplingError, match=r"data\.heldout differs"):
        compare([Side(random_run, "demo", "a"), Side(run, "demo", "b")])
    with pytest.raises(SamplingError, match="1 models to compare: name two or more of full, monolith, once"):
        compare([Side(random_run, "demo", "a")], ["full"])


def test_the_command_writes_a_page_and_names_what_is_missing(
    random_run: Run, evaluated: Path, other: Run, tmp_path: Path
) -> None:
    def ddm(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["compare", *arguments])

    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    done = ddm(random_run.url, f"{other.url}@few", "--model", "once", "--output", str(page), "--json", str(numbers))
    assert done.exit_code == 0, done.output
    (difference,) = json.loads(numbers.read_text())["differences"]
    assert difference.keys() == Difference.__dataclass_fields__.keys()
    assert (difference["model"], difference["against"]) == ("second: once", "run: once")
    assert difference["low"] < difference["frechet"] < difference["high"]
    assert "second: once against run: once" in done.output and page.stat().st_size > 10_000
    shutil.copytree(other.url, tmp_path / "second")
    again = info_of(evaluation("again"), num_samples=2, frechet={"once": 1.0}, best_strategy="once")
    commit_written(Run.open(str(tmp_path / "second")), evaluation("again"), [], again)
    several = ddm(str(tmp_path / "second"))
    assert several.exit_code == 1 and "which evaluation? It has several: name one as" in several.output
    shutil.rmtree(tmp_path / "second/eval")
    assert "which evaluation? It has none; make one with: ddm evaluate " in ddm(str(tmp_path / "second")).output
    assert "named twice" in ddm(random_run.url, random_run.url).output
    assert (
        "no model 'twice' among these evaluations: there are full, monolith"
        in ddm(random_run.url, "--model", "once", "--model", "twice").output
    )
    assert "there is no folder" in ddm(random_run.url, "--output", str(tmp_path / "none/page.html")).output
