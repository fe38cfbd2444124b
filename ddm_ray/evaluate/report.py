"""The report: metrics as one self-contained HTML page, or as a table for the terminal."""

import io
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ddm_ray.evaluate.features import NUM_FEATURES, features_in_words
from ddm_ray.evaluate.router_page import router_page
from ddm_ray.pictures.figure import curve_charts, figure_png, line_chart
from ddm_ray.pictures.page import page
from ddm_ray.storage.graph import EXTRAS

MOSAICS = "mosaics of real rows"
"""Name of the line of what a measure must find bad."""
FAR = 5.0
"""Times the distance of held-out real rows from which a model is far, though these be fewer than its samples.

Fewer rows are further away: the number errs on the model's side.
"""
CONFIRMED = 0.8
"""Share of what held-out rows reach in a measure from which mosaics show that it can't tell."""
LIKE_MOSAICS = 0.5
"""Share of the mosaics' distance from which a model is far."""
MODEL_COLUMNS = {
    "model": "model",
    "frechet": "Fréchet distance",
    "accuracy": "accuracy",
    "clip": "CLIP score",
    "precision": "precision",
    "recall": "recall",
    "kid": "KID ×1000",
    "density": "density",
    "coverage": "coverage",
    "copied": "copied",
    "cluster_tv": "cluster TV",
}
COST_COLUMNS = {
    "model": "model",
    "expert_rows_per_image": "expert rows / image",
    "router_rows_per_image": "router rows / image",
    "seconds_per_image": "ms / image",
}
TERMINAL_COLUMNS = {
    "model": "model",
    "frechet": "distance",
    "accuracy": "accuracy",
    "clip": "CLIP",
    "precision": "precis.",
    "recall": "recall",
    "cluster_tv": "TV",
    "expert_rows_per_image": "NFE",
    "seconds_per_image": "ms/img",
}


def render(metrics: dict[str, Any], grid_png: bytes, experts_png: bytes) -> str:
    """report.html, with its pictures inside."""
    losses = metrics["heldout_loss"]
    return page(
        "evaluation",
        metrics=metrics,
        headings=measured(MODEL_COLUMNS, [*metrics["models"], *metrics["real"]]),
        cost_headings=COST_COLUMNS,
        cell=cell,
        lowest=min(row["frechet"] for row in metrics["models"]),
        sentences=sentences(metrics),
        notes=notes(metrics),
        training_sentence=_training_sentence(metrics["training"]),
        losses=losses,
        losses_png=_losses_png(losses) if losses else None,
        curves_png=_curves_png(metrics.get("curves", {})),
        router=router_page(metrics["router"]) if metrics["router"] else None,
        grid_png=grid_png,
        experts_png=experts_png,
    )


def print_table(metrics: dict[str, Any]) -> str:
    """The table of models and what follows from it, as text at most 100 characters wide."""
    table, rows = Table(box=SIMPLE, pad_edge=False), [*metrics["models"], *metrics["real"]]
    columns = measured(TERMINAL_COLUMNS, rows)
    for key, heading in columns.items():
        table.add_column(heading, justify="left" if key == "model" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(key, row) for key in columns))
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=False, highlight=False)
    console.print(table)
    for sentence in [*sentences(metrics), _training_sentence(metrics["training"])]:
        console.print(sentence, markup=False)
    return text.getvalue()


def measured(columns: dict[str, str], rows: list[dict[str, Any]]) -> dict[str, str]:
    """Columns, by key, in which some row has a value."""
    return {key: heading for key, heading in columns.items() if any(row.get(key) is not None for row in rows)}


def sentences(metrics: dict[str, Any]) -> list[str]:
    """The findings in words, from the numbers alone, with how far they can be trusted."""
    best = min(metrics["models"], key=_distance)
    denses = {row["model"]: row for row in metrics["models"] if row["model"] in EXTRAS}
    rivals = [row for row in metrics["models"] if row["model"] not in EXTRAS]
    lines = [f"Lowest Fréchet distance: {best['model']} ({best['frechet']:.3g})."]
    lines += _warnings(metrics)
    if rivals and (monolith := denses.get("monolith")):
        rival = min(rivals, key=_distance)
        lines.append(_compared(metrics, f"The mixture's best strategy, {rival['model']},", rival, monolith))
    if student := denses.get("student"):
        others = [denses["monolith"]] if "monolith" in denses else sorted(rivals, key=_distance)[:1]
        lines += [_compared(metrics, "The student", student, other) for other in others]
    for row in metrics["models"]:
        other = {key: value for key, value in row.get("sampling", {}).items() if value != metrics["sampling"][key]}
        if other:
            lines.append(
                f"{row['model']} was sampled with {', '.join(f'{key} {value}' for key, value in other.items())}."
            )
    if milestones := metrics.get("milestones"):
        lines.append(f"By weights of models on their way: {milestones_in_words(milestones)}.")
    if elsewhere := metrics.get("rows_elsewhere"):
        lines.append(
            f"Real rows are those that are here: clusters {', '.join(map(str, elsewhere))} are at their owners'."
        )
    lines += [f"Not measured: {line}." for line in metrics.get("missing", {}).values()]
    lines += [f"Pictures: {credit}" for credit in [metrics.get("credit")] if credit]
    lines.append("Every model was trained once, with one seed: a difference may be the luck of a training run.")
    return lines


def milestones_in_words(milestones: dict[str, dict[str, int]]) -> str:
    """Words on the steps of models that weren't finished, those of equal ones together."""
    by_step: dict[tuple[int, int], list[str]] = {}
    for artifact, each in milestones.items():
        by_step.setdefault((each["step"], each["of"]), []).append(artifact)
    return "; ".join(f"{', '.join(names)} after {step:,} of {of:,} steps" for (step, of), names in by_step.items())


def _warnings(metrics: dict[str, Any]) -> list[str]:
    """Models that paint hardly better than mosaics, and measures that take mosaics for real rows."""
    real = {row["model"]: row for row in metrics["real"]}
    if (mosaics := real.get(MOSAICS)) is None:  # an older version's
        return []
    heldout = next((row for name, row in real.items() if name.endswith("held out")), None)
    lines = [
        f"{row['model']} is far from real rows: its distance is {' and '.join(grounds)}."
        for row in metrics["models"]
        if (grounds := _grounds(row["frechet"], mosaics["frechet"], heldout["frechet"] if heldout else None))
    ]
    if heldout:
        blind = [key for key in ("precision", "density", "coverage") if mosaics[key] > CONFIRMED * heldout[key]]
        lines += [
            f"{MODEL_COLUMNS[key].capitalize()} can't tell here: mosaics have {mosaics[key]:.2f}, held-out real rows"
            f" {heldout[key]:.2f}."
            for key in blind
        ]
    return lines


def _grounds(distance: float, mosaics: float, heldout: float | None) -> list[str]:
    """The grounds in words on which a model of this Fréchet distance is far, by those of real rows."""
    grounds = []
    if distance > LIKE_MOSAICS * mosaics:
        grounds.append(f"{distance / mosaics:.0%} of that of mosaics, each of four real rows ({mosaics:.3g})")
    if heldout is not None and distance > FAR * heldout:
        grounds.append(f"{distance / heldout:.0f} times that of held-out real rows ({heldout:.3g})")
    return grounds


def _distance(row: dict[str, Any]) -> float:
    return row["frechet"]


def _compared(metrics: dict[str, Any], subject: str, row: dict[str, Any], other: dict[str, Any]) -> str:
    change = row["frechet"] / other["frechet"] - 1
    whose = "the monolith's" if other["model"] == "monolith" else f"that of {other['model']},"
    text = f"{subject} is {abs(change):.0%} {'above' if change > 0 else 'below'} {whose} {other['frechet']:.3g}"
    pair = row["model"], other["model"]
    between = [each for each in metrics.get("differences", ()) if (each["model"], each["against"]) == pair]
    return f"{text}; {difference_words(between[0])}." if between else f"{text}."  # an older version's have none


def difference_words(difference: dict[str, Any]) -> str:
    """Words on a `Difference`: how large it is, and whether other samples of the same models might turn it round."""
    low, high = difference["low"], difference["high"]
    verdict = "which other seeds might turn round" if low <= 0 <= high else "more than the luck of the seeds"
    return f"the difference is {difference['frechet']:+.2g}, between {low:+.2g} and {high:+.2g} (95%), {verdict}"


def notes(metrics: dict[str, Any]) -> list[str]:
    """Notes on how each column is measured."""
    count, rows = metrics["num_samples"], metrics["num_real"]
    heldout = next((row for row in metrics["real"] if row["model"].endswith("held out")), None)
    held_out = right_of_held_out = ""
    features = metrics.get("features") or features_in_words(None, NUM_FEATURES)  # an older version's had no others
    if heldout:
        held_out = f" Held out: {heldout['n']} rows never trained on; compare with as many drawn again."
        if heldout["accuracy"] is not None:
            right_of_held_out = f" On held-out real rows it is right in {heldout['accuracy']:.1%}."
    return [
        f"Fréchet distance: between {count} samples and {rows} training rows, in {features}; ± is the standard"
        " deviation over other samples of the model. It shrinks as the number of samples grows:"
        " compare equal numbers only.",
        f"Real, drawn again: training rows themselves, with replacement{_floor_words(metrics)}.{held_out}",
        f"Accuracy: how often a small classifier fitted to the training rows sees the class that was asked"
        f" for.{right_of_held_out}",
        *_clip_note(metrics.get("clip")),
        "Precision and recall: by balls to the third nearest neighbour in these features (arXiv 1904.06991); density"
        " and coverage: to the fifth (arXiv 2002.09797), density may be above 1. Of 10,000 rows each at most.",
        "KID ×1000: kernel distance (arXiv 1801.01401), which has no such bias; it may be negative.",
        "Copied: samples nearer to a training row than that row's nearest other one (1 - authenticity, arXiv"
        " 2102.08921), measured where all training rows are at hand; far above what held-out rows have, a model repeats"
        " what it was shown.",
        f"{MOSAICS.capitalize()}: each quarter is another training row's. A measure that finds them good can't tell.",
        "Cluster TV: total variation between the samples' clusters (that of the nearest training row in these"
        " features) and those which their labels lead to expect, 0 to 1.",
        "Rows per image: evaluations of an expert, and of the router, for one image."
        " ms / image: time of one CPU core (on an accelerator: elapsed time), experts and router together.",
    ]


def _floor_words(metrics: dict[str, Any]) -> str:
    count, kept = metrics["num_samples"], metrics.get("num_kept", metrics["num_real"])
    if kept < metrics["num_real"]:
        return f", of {kept} that were drawn of them; a good sampler may be below"
    return f"; no sampler should be expected below {count} of them"


def _clip_note(clip: str | None) -> list[str]:
    if clip is None:
        return []
    return [
        f"CLIP score: 100 times the cosine between an image and its text as {Path(clip).name} sees them (arXiv"
        " 2104.08718), 0 where it is below; ± is the standard error over images. That of held-out rows is by their own"
        " texts."
    ]


def cell(key: str, row: dict[str, Any]) -> str:
    """The text of a column of MODEL_COLUMNS in a row."""
    value = row.get(key)
    if value is None:
        return "–"
    if key == "frechet":
        return f"{value:.3g} ± {row['frechet_std']:.2g}"
    if key == "clip":
        return f"{value:.2f} ± {row['clip_std']:.2g}"
    if key == "kid":
        return f"{1000 * value:.1f} ± {1000 * row['kid_std']:.1f}"
    if key == "seconds_per_image":
        return f"{1000 * value:.1f}"
    if key.endswith("per_image"):
        return f"{value:g}"
    return str(value) if isinstance(value, str) else f"{value:.3f}"


def _losses_png(losses: list[dict[str, Any]]) -> bytes:
    """Each model's loss by t, relative to the first one's."""
    first_T = losses[0]["by_t"]
    relative = {row["model"]: [own / base for own, base in zip(row["by_t"], first_T, strict=True)] for row in losses}
    return figure_png(line_chart(relative), transparent=True)


def _curves_png(curves: dict[str, Any]) -> bytes | None:
    """Losses in training and on held-out rows by step, a chart for each kind of network; None for no curve."""
    charts = {
        {"expert": "experts (mean)"}.get(kind, kind): {
            "training": (curve["steps"], curve["losses"]),
            **({"held out": (curve["heldout_steps"], curve["heldout"])} if curve["heldout"] else {}),
        }
        for kind, curve in curves.items()
    }
    return figure_png(curve_charts(charts), transparent=True) if charts else None


def _training_sentence(training: dict[str, Any]) -> str:
    parts = [f"Training FLOPs of all experts together: {training['experts_flops']:.3g}"]
    if training["experts_over_monolith"] is not None:
        parts.append(f", {training['experts_over_monolith']:.3f} times the monolith's")
    if training["router_over_experts"] is not None:
        parts.append(f"; the router adds {training['router_over_experts']:.1%}")
    return "".join(parts) + "."
