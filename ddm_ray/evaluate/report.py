"""The report: metrics as one self-contained HTML page, or as a table for the terminal."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ddm_ray.evaluate.apart import apart_in_words
from ddm_ray.evaluate.controls import MOSAICS, cautions, held_out, marked
from ddm_ray.evaluate.metrics import COSTS, COSTS_NOTE, Column, measured, notes
from ddm_ray.evaluate.router_page import router_page
from ddm_ray.pictures.figure import curve_charts, figure_png, line_chart
from ddm_ray.pictures.page import render_page
from ddm_ray.run.graph import EXTRAS


def render_report(metrics: dict[str, Any], pictures: Mapping[str, bytes]) -> str:
    """Render report.html. `pictures`: PNG files by their names, which are embedded."""
    losses, rows = metrics["heldout_loss"], [*metrics["models"], *metrics["real"]]
    return render_page(
        "evaluation",
        metrics=metrics,
        columns=measured(marked(metrics), rows),
        costs=measured(COSTS, rows),
        sentences=findings(metrics),
        notes=notes_of(metrics),
        training_sentence=_training_sentence(metrics["training"]),
        losses=losses,
        losses_png=_losses_png(losses) if losses else None,
        curves_png=_curves_png(metrics.get("curves", {})),
        router=router_page(metrics["router"], metrics.get("clusters")) if metrics["router"] else None,
        mixture_png=pictures["mixture.png"],
        mixture_words=apart_in_words(metrics) or "",
        grid_png=pictures["grid.png"],
        experts_png=pictures["experts.png"],
    )


def report_table(metrics: dict[str, Any]) -> str:
    """The table of models and its findings as text, at most 100 characters wide."""
    rows = [*metrics["models"], *metrics["real"]]
    return as_text([*marked(metrics), *COSTS], rows, [*findings(metrics), _training_sentence(metrics["training"])])


def as_text(every: Sequence[Column], rows: Sequence[dict[str, Any]], lines: Sequence[str]) -> str:
    """Rows as a table of the terminal's columns, followed by `lines`, at most 100 characters wide."""
    table, shown = Table(box=SIMPLE, pad_edge=False), measured([each for each in every if each.terminal], rows)
    table.add_column("model", overflow="fold")
    for column in shown:
        table.add_column(column.terminal or "", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["model"], *(column.cell(row) for column in shown))
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=False, highlight=False)
    console.print(table)
    for line in lines:
        console.print(line, markup=False)
    return text.getvalue()


def findings(metrics: dict[str, Any]) -> list[str]:
    """The findings in words, from the numbers alone, and how far they can be trusted."""
    best = min(metrics["models"], key=_distance)
    denses = {row["model"]: row for row in metrics["models"] if row["model"] in EXTRAS}
    rivals = [row for row in metrics["models"] if row["model"] not in EXTRAS]
    lines = [*cautions(metrics), f"Lowest Fréchet distance: {best['model']} ({best['frechet']:.3g})."]
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
        lines.append(f"Models that were still training, measured by a milestone: {milestones_in_words(milestones)}.")
    if elsewhere := metrics.get("rows_elsewhere"):
        lines.append(
            f"Only their owners have the real rows of clusters {', '.join(map(str, elsewhere))}: they are left out."
        )
    lines += [f"Not measured: {line}." for line in metrics.get("missing", {}).values()]
    lines += [f"Pictures: {credit}" for credit in [metrics.get("credit")] if credit]
    lines.append("Every model was trained once, with one seed: a difference may be the luck of a training run.")
    return lines


def milestones_in_words(milestones: dict[str, dict[str, int]]) -> str:
    """Describe the steps of models that weren't finished, grouped by step."""
    by_step: dict[tuple[int, int], list[str]] = {}
    for artifact, each in milestones.items():
        by_step.setdefault((each["step"], each["of"]), []).append(artifact)
    return "; ".join(f"{', '.join(names)} after {step:,} of {of:,} steps" for (step, of), names in by_step.items())


def _distance(row: dict[str, Any]) -> float:
    return row["frechet"]


def _compared(metrics: dict[str, Any], subject: str, row: dict[str, Any], other: dict[str, Any]) -> str:
    change = row["frechet"] / other["frechet"] - 1
    reference = "the monolith's" if other["model"] == "monolith" else f"that of {other['model']},"
    text = f"{subject} is {abs(change):.0%} {'above' if change > 0 else 'below'} {reference} {other['frechet']:.3g}"
    pair = row["model"], other["model"]
    between = [each for each in metrics.get("differences", ()) if (each["model"], each["against"]) == pair]
    return f"{text}; {difference_words(between[0])}." if between else f"{text}."  # none in older versions


def difference_words(difference: dict[str, Any]) -> str:
    """Describe a `Difference`: its size, and whether other samples of the same models might reverse it."""
    low, high = difference["low"], difference["high"]
    verdict = "which other seeds might reverse" if low <= 0 <= high else "more than the luck of the seeds"
    return f"the difference is {difference['frechet']:+.2g}, between {low:+.2g} and {high:+.2g} (95%), {verdict}"


def notes_of(metrics: dict[str, Any]) -> list[str]:
    """Notes on each column, and on the lines of real rows."""
    more = ""
    if heldout := held_out(metrics):
        more = f" Held out: {heldout['n']} rows never trained on; compare with as many drawn again."
    return [
        *notes(metrics, [*metrics["models"], *metrics["real"]]),
        f"Real, drawn again: training rows themselves, with replacement{_floor_words(metrics)}.{more}",
        f"{MOSAICS.capitalize()}: each quarter is another training row's. A measure that finds them, or noise, as good"
        " as held-out rows can't tell: its values of models have a question mark.",
        COSTS_NOTE,
    ]


def _floor_words(metrics: dict[str, Any]) -> str:
    count, kept = metrics["num_samples"], metrics["num_kept"]
    if kept < metrics["num_real"]:
        return f", of {kept} that were drawn of them; a good sampler may be below"
    return f"; no sampler should be expected below {count} of them"


def _losses_png(losses: list[dict[str, Any]]) -> bytes:
    """Each model's loss by t, relative to the first model's."""
    first_T = losses[0]["by_t"]
    relative = {row["model"]: [own / base for own, base in zip(row["by_t"], first_T, strict=True)] for row in losses}
    return figure_png(line_chart(relative))


def _curves_png(curves: dict[str, Any]) -> bytes | None:
    """Training and held-out loss by step, one chart per kind of network; None if there are no curves."""
    charts = {
        _title(kind): {
            "training": (curve["steps"], curve["losses"]),
            **({"held out (EMA weights)": (curve["heldout_steps"], curve["heldout"])} if curve["heldout"] else {}),
        }
        for kind, curve in curves.items()
    }
    return figure_png(curve_charts(charts)) if charts else None


def _title(kind: str) -> str:
    if kind == "expert":
        return "experts (mean)"
    return f"{kind} (mean)" if kind.startswith("experts ") else kind


def _training_sentence(training: dict[str, Any]) -> str:
    parts = [f"Training FLOPs of all experts together: {training['experts_flops']:.3g}"]
    if training["experts_over_monolith"] is not None:
        parts.append(f", {training['experts_over_monolith']:.3f} times the monolith's")
    if training["router_over_experts"] is not None:
        parts.append(f"; the router adds {training['router_over_experts']:.1%}")
    return "".join(parts) + "."
