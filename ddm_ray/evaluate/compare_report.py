"""A comparison as one self-contained HTML page, or as a table for the terminal."""

from dataclasses import asdict

from ddm_ray.evaluate.compare import Comparison
from ddm_ray.evaluate.metrics import COSTS, COSTS_NOTE, Column, columns, measured, notes
from ddm_ray.evaluate.report import as_text, difference_words
from ddm_ray.pictures.figure import error_chart, figure_png
from ddm_ray.pictures.page import render_page


def render_comparison(comparison: Comparison) -> str:
    """Render the comparison as a page with embedded pictures."""
    lines, settings = comparison.lines, _settings(comparison)
    points = {line["model"]: (line["training_flops"], line["frechet"], line["frechet_std"]) for line in lines}
    chart = error_chart(points, "training FLOPs", "Fréchet distance")
    return render_page(
        "compare",
        comparison=comparison,
        columns=measured(columns(across_runs=True), lines),
        costs=[*measured(COSTS, lines), *(Column((name,), name, str) for name in settings)],
        rows=[line | line["sampling"] for line in lines],
        sentences=comparison_findings(comparison),
        notes=[*notes(comparison.as_json(), lines, across_runs=True), COSTS_NOTE],
        grid_png=comparison.grid_png,
        chart_png=figure_png(chart),
    )


def comparison_table(comparison: Comparison) -> str:
    """The table and its findings as text, at most 100 characters wide."""
    return as_text([*columns(across_runs=True), *COSTS], comparison.lines, comparison_findings(comparison))


def comparison_findings(comparison: Comparison) -> list[str]:
    """The findings in words: each model against the first, and settings that differ."""
    first = comparison.lines[0]["model"]
    lines = []
    for difference in comparison.differences:
        pairs = "" if difference.model in comparison.paired else " (other labels or seeds: not paired)"
        lines.append(f"{difference.model} against {first}: {difference_words(asdict(difference))}{pairs}.")
    if settings := _settings(comparison):
        lines.append(f"They were sampled with different {', '.join(settings)}.")
    lines.append("A difference between models that were trained once may also be the luck of a training run.")
    return lines


def _settings(comparison: Comparison) -> list[str]:
    """Names of the sampling settings that differ."""
    every = [line["sampling"] for line in comparison.lines]
    return [name for name in every[0] if any(each.get(name) != every[0][name] for each in every)]
