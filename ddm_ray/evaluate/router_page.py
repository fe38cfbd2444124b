"""The router's section of the report: its charts, and its findings in words. Reads only metrics.json."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddm_ray.pictures.figure import figure_png, heat_map, line_charts


@dataclass(frozen=True)
class RouterPage:
    """PNG pictures, a sentence per chart and one on the confusion, headings and lines of the table of shares.

    A line has the number of its expert.
    """

    by_t_png: bytes
    by_t_notes: list[str]
    confusion_png: bytes
    confusion_note: str
    share_headings: list[str]
    share_lines: list[tuple[int, list[float]]]


def router_page(router: dict[str, Any], clusters: list[int] | None = None) -> RouterPage:
    """Pictures of, and notes on, the router's numbers in metrics.json. `clusters`: their numbers; None: from 0."""
    shares, trajectories = router["shares"], router["trajectories"]
    numbers = clusters or [*range(len(router["confusion"]))]
    columns = {
        "training rows": shares["training"],
        "held-out rows": shares["heldout"],
        "posterior": shares["posterior"],
        "likeliest": shares["likeliest"],
    } | {f"images by {row['strategy']}": row["last"] for row in trajectories}
    return RouterPage(
        by_t_png=_by_t_png(router),
        by_t_notes=_by_t_notes(router),
        confusion_png=_confusion_png(router["confusion"], numbers),
        confusion_note=_confusion_note(router["confusion"], numbers),
        share_headings=list(columns),
        share_lines=[(number, line) for number, *line in zip(numbers, *columns.values(), strict=True)],
    )


def _by_t_png(router: dict[str, Any]) -> bytes:
    by_t = router["by_t"]

    def line(key: str) -> list[float]:
        return [math.nan if score is None else score[key] for score in by_t]

    def level(value: float) -> list[float]:
        return [value] * len(by_t)

    charts = {
        "accuracy": {"without an image": level(router["prior_accuracy"]), "router": line("accuracy")},
        "entropy, nats": {"without an image": level(router["prior_entropy"]), "router": line("entropy")},
        "calibration error": {"calibrated, so few rows": line("ece_floor"), "router": line("ece")},
    }
    return figure_png(line_charts(charts))


def _by_t_notes(router: dict[str, Any]) -> list[str]:
    clear, *_, noisy = [score["accuracy"] for score in router["by_t"] if score is not None]
    return [
        f"Accuracy: how often the cluster that the router holds to be the likeliest is the right one: {clear:.0%} with"
        f" the least noise, {noisy:.0%} with the most. Grey: {router['prior_accuracy']:.0%}, for naming the largest"
        " cluster of the image's class without looking. Near t = 1 there is nothing more to see than noise.",
        "Entropy: how undecided the router is, 0 where it is sure of one cluster. It should rise with the noise,"
        f" towards {router['prior_entropy']:.2f} (grey), which is what the image's class leaves open.",
        "Calibration error (ECE): how far the router's certainty is from how often it is right; of all that it calls"
        " 80% sure, 80% should be right. Grey: about what a router without this fault would show on so few rows, so"
        " only what is well above it counts.",
    ]


def _confusion_png(confusion: list[list[int]], numbers: list[int]) -> bytes:
    chart = heat_map(_of_each_line(confusion), "cluster of the row", "the router's likeliest", numbers)
    return figure_png(chart)


def _confusion_note(confusion: list[list[int]], numbers: list[int]) -> str:
    share_KK = _of_each_line(confusion)
    np.fill_diagonal(share_KK, 0)
    true, likeliest = np.unravel_index(share_KK.argmax(), share_KK.shape)
    worst, mistake = share_KK[true, likeliest], ""
    if worst > 0:
        mistake = f" The most frequent mistake: cluster {numbers[true]}, taken for {numbers[likeliest]} in {worst:.0%}."
    return (
        "Of 100 noised held-out rows of a cluster (line), how many the router takes for each cluster (column), with t"
        f" uniform in [0, 1]. On the diagonal it is right.{mistake}"
    )


def _of_each_line(confusion: list[list[int]]) -> np.ndarray:
    """Each line's counts as shares (K, K); 0 in a line without rows."""
    count_KK = np.array(confusion, dtype=np.float64)
    return count_KK / count_KK.sum(axis=1, keepdims=True).clip(min=1)
