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

pytestmark = pytest.mark.contract


@pytest.fixture
def metrics(evaluated: Path) -> dict[str, Any]:
    return json.loads((evaluated / "metrics.json").read_text())


def with_facts(metrics: dict[str, Any], **facts: Any) -> dict[str, Any]:
    changed = deepcopy(metrics)
    for row in changed["models"]:
        row["accuracy"] = 0.934 if row["model"] == "once" else 0.5
    own = {"strategy": "once", "rows": [3, 2000], "classes": [*"0123456789"], "rare": [["0", "4"], ["0", "7", "9"]]}
    changed["apart"] = own | {"recognised": [0.6] * 10} | facts
    return changed


def test_the_numbers_are_those_of_the_partition(random_run: Run, metrics: dict[str, Any]) -> None:
    """Each expert of this run has hardly any rows of one digit. Its networks, untrained, paint none."""
    info, facts = PartitionInfo.of(random_run.require(PARTITION)), metrics["apart"]
    counts_KC, sums = [*zip(*info.counts_CK, strict=True)], [*map(sum, info.counts_CK)]
    best = min((row for row in metrics["models"] if row["model"] != "monolith"), key=lambda row: row["frechet"])
    assert facts["rows"] == [*info.rows_K]
    few = [[f"{label}" for label in range(10) if counts_K[label] <= 0.03 * sums[label]] for counts_K in counts_KC]
    assert (facts["strategy"], facts["classes"], facts["rare"]) == (best["model"], [*"0123456789"], few)
    assert all(few)
    assert len(facts["recognised"]) == 10
    assert min(facts["recognised"]) <= best["accuracy"] <= max(facts["recognised"])
    numbers = " and ".join(map(str, info.rows_K))
    assert (
        apart_in_words(metrics)
        == f"Each of the two experts was trained on images that no other one was shown: {numbers}."
    )


def test_what_each_expert_lacks_the_mixture_paints(metrics: dict[str, Any]) -> None:
    assert apart_in_words(with_facts(metrics)) == (
        "Each of the two experts was shown at most 3% of the images of two digits or more, yet together they paint"
        " all ten: a classifier reads 93% of their 300 samples as the digit asked for."
    )
    named = apart_in_words(with_facts(metrics, classes=["cat", "dog"], rare=[["cat"], ["dog"]], recognised=[1, 0.6]))
    assert named is not None and "of one class or more" in named and "as the class asked" in named


@pytest.mark.parametrize(
    "facts",
    [
        {"rare": [["0"], []]},
        {"recognised": [0.6] * 9 + [0.5]},
        {"recognised": None},
        {"classes": [], "rare": [[], []]},
    ],
)
def test_it_says_no_more_than_the_numbers_do(metrics: dict[str, Any], facts: dict[str, Any]) -> None:
    text = apart_in_words(with_facts(metrics, **facts))
    assert text == "Each of the two experts was trained on images that no other one was shown: 3 and 2,000."


def test_many_experts_are_summed_up_and_an_older_evaluation_says_nothing(metrics: dict[str, Any]) -> None:
    many = apart_in_words(with_facts(metrics, rows=[*range(1000, 1020)], rare=[[]] * 20))
    assert many is not None and many.startswith("Each of the 20 experts") and many.endswith("1,000 to 1,019 of them.")
    del metrics["apart"]
    assert apart_in_words(metrics) is None
