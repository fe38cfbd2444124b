"""The metrics of an evaluation in one table: how each is measured, the keys of its values, its columns and its note.

Reports, comparisons, the terminal and metrics.json all follow this table and its order. To add a metric, add an
entry to METRICS and its function. `distances` has the mathematics.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from ddm_ray.evaluate.distances import kid, total_variation
from ddm_ray.evaluate.image_set import NEIGHBOUR_ROWS, ImageSet, PulledDistance

NORMAL_95 = 1.96

Values = dict[str, float | None]


@dataclass(frozen=True)
class Column:
    """A column of a table: the keys of its values in a row, and its heading on pages.

    A cell is empty if the row lacks the first key. `words` formats the values. `terminal`: heading in the terminal;
    None: the column is on pages only. `best`: which of the values is; None: none is. `sees_mosaics`: mosaics of real
    rows should have a worse value than real rows. `unsure`: models with values that say nothing, and are marked.
    """

    keys: tuple[str, ...]
    heading: str
    words: Callable[..., str] = "{:.3f}".format
    terminal: str | None = None
    best: Literal["highest", "lowest"] | None = None
    sees_mosaics: bool = False
    unsure: Collection[str] = ()

    @property
    def key(self) -> str:
        """The key of the column's first value."""
        return self.keys[0]

    def cell(self, row: dict[str, Any]) -> str:
        """The text of the column's cell in a row."""
        if row.get(self.key) is None:
            return "–"
        return self.words(*(row[key] for key in self.keys)) + ("?" if row.get("model") in self.unsure else "")


@dataclass(frozen=True)
class Metric:
    """Columns that one function measures, and a note on them: a template over the fields of metrics.json.

    `of_rows_again`: it applies to redrawn real rows. `of_captions`: it applies only to images sampled for captions.
    `across_runs`: it is meaningful beside another run's.
    """

    columns: tuple[Column, ...]
    note: str
    measure: Callable[[ImageSet], Values]
    of_rows_again: bool = False
    of_captions: bool = False
    across_runs: bool = True

    def values(self, images: ImageSet) -> Values:
        """Values by key; None if a value isn't measured for these images."""
        if self.of_captions and images.caption_M is None:
            return {}
        if images.images is None and not self.of_rows_again:
            return {key: None for column in self.columns for key in column.keys}
        return self.measure(images)


def deviation(pull_M: np.ndarray) -> float:
    """The standard deviation, over other samples, of a distance that M samples pull on."""
    return float(pull_M.std(ddof=1) / len(pull_M) ** 0.5)


@dataclass(frozen=True)
class Difference:
    """A model's Fréchet distance minus another's, and the ends of its 95 % interval over other samples.

    Images with the same label and seed are pairs with similar pulls, so a difference is known better than its terms.
    """

    model: str
    against: str
    frechet: float
    low: float
    high: float

    @classmethod
    def of(cls, names: tuple[str, str], model: PulledDistance, against: PulledDistance) -> Self:
        """From the distances of two equally large sets of images."""
        estimate = model[0] - against[0]
        half = NORMAL_95 * deviation(model[1] - against[1])
        return cls(*names, estimate, estimate - half, estimate + half)


def _frechet(images: ImageSet) -> Values:
    distance, pull_M = images.distance
    return {"frechet": distance, "frechet_std": deviation(pull_M)}


def _kid(images: ImageSet) -> Values:
    reference = images.reference
    distance, spread = kid(reference.real.features_MD, images.features_MD, reference.seed)
    return {"kid": distance, "kid_std": spread}


def _accuracy(images: ImageSet) -> Values:
    return {"accuracy": float(np.mean(images.class_M == images.label_M)) if images.reference.labelled else None}


def _neighbourhood(images: ImageSet) -> Values:
    """Measured on the first NEIGHBOUR_ROWS images."""
    reference = images.reference
    values = asdict(reference.neighbours.compare(images.features_MD[:NEIGHBOUR_ROWS]))
    if not reference.whole_set or reference.real.rows > NEIGHBOUR_ROWS:
        values["copied"] = None
    return values


def _cluster_tv(images: ImageSet) -> Values:
    prior_CK = images.reference.prior_CK
    share_K = np.bincount(images.cluster_M, minlength=prior_CK.shape[1]) / len(images)
    return {"cluster_tv": total_variation(share_K, prior_CK[images.label_M].mean(0))}


def _clip(images: ImageSet) -> Values:
    captions = images.reference.captions
    assert captions is not None and images.images is not None and images.caption_M is not None
    return {**captions.score(images.images(), images.caption_M)}


METRICS: tuple[Metric, ...] = (
    Metric(
        (
            Column(
                ("frechet", "frechet_std"),
                "Fréchet distance",
                "{:.3g} ± {:.2g}".format,
                terminal="distance",
                best="lowest",
            ),
        ),
        "Fréchet distance: between {num_samples} samples and {num_real} training rows, in {features}; ± is the standard"
        " deviation over other samples of the model. It shrinks as the number of samples grows: compare equal numbers"
        " only.",
        _frechet,
        of_rows_again=True,
    ),
    Metric(
        (
            Column(
                ("kid", "kid_std"), "KID ×1000", lambda kid, std: f"{1000 * kid:.1f} ± {1000 * std:.1f}", best="lowest"
            ),
        ),
        "KID ×1000: kernel distance (arXiv 1801.01401), which has no such bias; it may be negative.",
        _kid,  # it would be negative on the same rows
    ),
    Metric(
        (Column(("accuracy",), "accuracy", terminal="accuracy", best="highest"),),
        "Accuracy: how often a small classifier fitted to the training rows sees the class that was asked for.",
        _accuracy,
    ),
    Metric(
        (
            Column(("precision",), "precision", terminal="precis.", best="highest", sees_mosaics=True),
            Column(("recall",), "recall", terminal="recall", best="highest"),
            Column(("density",), "density", best="highest", sees_mosaics=True),
            Column(("coverage",), "coverage", best="highest", sees_mosaics=True),
            Column(("copied",), "copied", best="highest"),
        ),
        "Precision and recall: by balls to the third nearest neighbour in these features (arXiv 1904.06991); density"
        " and coverage: to the fifth (arXiv 2002.09797), density may be above 1. Of 10,000 rows each at most. Copied:"
        " samples nearer to a training row than that row's nearest other one (1 - authenticity, arXiv 2102.08921),"
        " measured where all training rows are at hand; far above what held-out rows have, a model repeats what it was"
        " shown.",
        _neighbourhood,  # on the same rows, every row's nearest neighbour is itself
    ),
    Metric(
        (Column(("cluster_tv",), "cluster TV", terminal="TV", best="lowest"),),
        "Cluster TV: total variation between the samples' clusters (that of the nearest training row in these"
        " features) and those which their labels lead to expect, 0 to 1.",
        _cluster_tv,
        of_rows_again=True,
        across_runs=False,
    ),
    Metric(
        (Column(("clip", "clip_std"), "CLIP score", "{:.2f} ± {:.2g}".format, terminal="CLIP", best="highest"),),
        "CLIP score: 100 times the cosine between an image and its text as {clip} sees them (arXiv 2104.08718), 0 where"
        " it is below; ± is the standard error over images. That of held-out rows is by their own texts.",
        _clip,
        of_captions=True,
    ),
)

COSTS: tuple[Column, ...] = (
    Column(("expert_rows_per_image",), "expert rows / image", "{:g}".format, terminal="NFE"),
    Column(("router_rows_per_image",), "router rows / image", "{:g}".format),
    Column(("seconds_per_image",), "ms / image", lambda seconds: f"{1000 * seconds:.1f}", terminal="ms/img"),
    Column(("training_flops",), "training FLOPs", "{:.3g}".format, terminal="FLOPs"),
)
COSTS_NOTE = (
    "Rows per image: evaluations of an expert, and of the router, for one image. ms / image: time of one CPU core (on"
    " an accelerator: elapsed time), experts and router together."
)


def row_of(images: ImageSet) -> dict[str, Any]:
    """The row of images in a table: their number `n`, and the values of all metrics by key."""
    row: dict[str, Any] = {"n": len(images)}
    for metric in METRICS:
        row |= metric.values(images)
    return row


def columns(across_runs: bool = False) -> list[Column]:
    """The columns of all metrics, or of those that are meaningful across runs."""
    return [column for metric in METRICS if metric.across_runs or not across_runs for column in metric.columns]


def measured(every: Sequence[Column], rows: Sequence[dict[str, Any]]) -> list[Column]:
    """The columns with a value in some row. This drops what an older version didn't measure."""
    return [column for column in every if any(row.get(column.key) is not None for row in rows)]


def notes(metrics: dict[str, Any], rows: Sequence[dict[str, Any]], across_runs: bool = False) -> list[str]:
    """Notes on the metrics measured in some row, in the order of the columns."""
    fields = metrics | {"clip": Path(metrics.get("clip") or "").name}
    shown = [metric for metric in METRICS if metric.across_runs or not across_runs]
    return [metric.note.format_map(fields) for metric in shown if measured(metric.columns, rows)]
