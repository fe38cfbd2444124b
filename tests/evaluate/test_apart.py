"""What the experts were trained on, and how their mixture paints: numbers of a run, and one sentence from them."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from ddm_ray.evaluate.apart import apart_in_words
from ddm_ray.run.graph import PARTITION
from ddm_ray.run.info import PartitionInfo
from ddm_ray.run.run import Run


@pytest.fixture
def metrics(evaluated: Path) -> dict[str, Any]:
    return json.loads((evaluated / "metrics.json").read_text())


def with_facts(metrics: dict[str, Any], **facts: Any) -> dict[str, Any]:
    changed = deepcopy(metrics)
    for row in changed["models"]:
        row["accuracy"] = 0.934 if row["model"] == "once" else 0.5
    own = {"strategy": "once", "rows": [3, 2000], "classes": [*"0123456789"], "unseen": [["0"], ["7", "9"]]}
    changed["apart"] = own | {"recognised": [0.6] * 10} | facts
    return changed


def test_the_numbers_are_those_of_the_partition(random_run: Run, metrics: dict[str, Any]) -> None:
    """Every expert of this run has rows of each digit."""
    info, facts = PartitionInfo.of(random_run.require(PARTITION)), metrics["apart"]
    best = min((row for row in metrics["models"] if row["model"] != "monolith"), key=lambda row: row["frechet"])
    assert facts["rows"] == [*info.rows_K]
    assert (facts["strategy"], facts["classes"], facts["unseen"]) == (best["model"], [*"0123456789"], [[], []])
    assert len(facts["recognised"]) == 10
    assert min(facts["recognised"]) <= best["accuracy"] <= max(facts["recognised"])
    numbers = " and ".join(map(str, info.rows_K))
    assert (
        apart_in_words(metrics)
        == f"Each of the two experts was trained on images that no other one was shown: {numbers}."
    )


def test_no_expert_was_shown_all(metrics: dict[str, Any]) -> None:
    assert apart_in_words(with_facts(metrics)) == (
        "None of the two experts was shown all ten digits, yet together they paint all ten: a classifier reads 93% of"
        " their 300 samples as the digit that was asked for."
    )
    named = apart_in_words(with_facts(metrics, classes=["cat", "dog"], unseen=[["cat"], ["dog"]], recognised=[1, 0.6]))
    assert named is not None and "was shown all two classes, yet" in named and "as the class that" in named


@pytest.mark.parametrize(
    "facts",
    [
        {"unseen": [["0"], []]},
        {"recognised": [0.6] * 9 + [0.5]},
        {"recognised": None},
        {"classes": [], "unseen": [[], []]},
    ],
)
def test_it_says_no_more_than_the_numbers_do(metrics: dict[str, Any], facts: dict[str, Any]) -> None:
    text = apart_in_words(with_facts(metrics, **facts))
    assert text == "Each of the two experts was trained on images that no other one was shown: 3 and 2,000."


def test_many_experts_are_summed_up_and_an_older_evaluation_says_nothing(metrics: dict[str, Any]) -> None:
    many = apart_in_words(with_facts(metrics, rows=[*range(1000, 1020)], unseen=[[]] * 20))
    assert many is not None and many.startswith("Each of the 20 experts") and many.endswith("1,000 to 1,019 of them.")
    del metrics["apart"]
    assert apart_in_words(metrics) is None
