"""Numbers, and a sentence, on experts that were trained apart, and on samples that their mixture makes together."""

from typing import Any

import numpy as np

from ddm_ray.evaluate.image_set import ImageSet
from ddm_ray.run.graph import PARTITION
from ddm_ray.run.info import PartitionInfo
from ddm_ray.run.run import Run

WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
RARE = 0.03
"""A class is rare to an expert that has at most this share of its training rows."""
MOSTLY = 0.5
"""A class is painted if more than this share of its samples is recognised."""
LISTED = 8
"""Maximum number of experts that have their numbers of images listed one by one."""


def apart(run: Run, strategy: str, recognised: list[float] | None) -> dict[str, Any]:
    """Each expert's number of training rows, and the classes that it has at most the share RARE of.

    `recognised`: by class, the share of the mixture's samples under this strategy that a classifier sees as that class.
    """
    info, names = PartitionInfo.of(run.require(PARTITION)), run.named.data.class_names
    by_class = dict(zip(names, info.counts_CK, strict=True)) if len(names) == len(info.counts_CK) > 1 else {}
    shown = {name: counts_K for name, counts_K in by_class.items() if any(counts_K)}
    return {
        "strategy": strategy,
        "rows": list(info.rows_K),
        "classes": [*shown],
        "rare": [
            [name for name, counts_K in shown.items() if counts_K[expert] <= RARE * sum(counts_K)]
            for expert in range(len(info.rows_K))
        ],
        "recognised": recognised,
    }


def recognised_shares(images: ImageSet) -> list[float] | None:
    """The share of each requested class's images that the classifier sees as that class; None without classes."""
    if not images.reference.labelled or images.class_M is None:
        return None
    correct_M = images.class_M == images.label_M
    return [float(correct_M[images.label_M == label].mean()) for label in np.unique(images.label_M)]


def apart_in_words(metrics: dict[str, Any]) -> str | None:
    """One sentence on the mixture, from the numbers alone; None for an evaluation of an older version."""
    facts = metrics.get("apart")
    if facts is None:
        return None
    experts, accuracy = _word(len(facts["rows"])), {row["model"]: row.get("accuracy") for row in metrics["models"]}
    rare = min(map(len, facts["rare"]))
    if rare and facts["recognised"] and min(facts["recognised"]) > MOSTLY:
        one, several = ("digit", "digits") if facts["classes"] == [*"0123456789"] else ("class", "classes")
        few, every = f"{_word(rare)} {several if rare > 1 else one}", _word(len(facts["classes"]))
        return (
            f"Each of the {experts} experts was shown at most {RARE:.0%} of the images of {few} or more, yet"
            f" together they paint all {every}: a classifier reads {accuracy[facts['strategy']]:.0%} of their"
            f" {metrics['num_samples']:,} samples as the {one} asked for."
        )
    return (
        f"Each of the {experts} experts was trained on images that no other one was shown: {_numbers(facts['rows'])}."
    )


def _numbers(rows: list[int]) -> str:
    if len(rows) > LISTED:
        return f"{min(rows):,} to {max(rows):,} of them"
    *others, last = (f"{count:,}" for count in rows)
    return f"{', '.join(others)} and {last}" if others else last


def _word(number: int) -> str:
    return WORDS[number] if number < len(WORDS) else f"{number:,}"
