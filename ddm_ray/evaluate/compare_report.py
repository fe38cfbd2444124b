"""A comparison as one self-contained HTML page, or as a table for the terminal."""

import io
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ddm_ray.evaluate.compare import Comparison
from ddm_ray.evaluate.report import COST_COLUMNS, MODEL_COLUMNS, cell, difference_words, measured
from ddm_ray.pictures.figure import error_chart, figure_png
from ddm_ray.pictures.page import page

LEFT_OUT = ("cluster_tv",)
"""Columns that mean nothing beside another run's clusters."""
TERMINAL_COLUMNS = ("frechet", "accuracy", "precision", "coverage", "expert_rows_per_image")


def render(comparison: Comparison) -> str:
    """The page, with its pictures inside."""
    headings = measured({key: each for key, each in MODEL_COLUMNS.items() if key not in LEFT_OUT}, comparison.lines)
    points = {
        line["model"]: (line["training_flops"], line["frechet"], line["frechet_std"]) for line in comparison.lines
    }
    chart = error_chart(points, "training FLOPs", "Fréchet distance")
    return page(
        "compare",
        comparison=comparison,
        headings=headings,
        cost_headings=COST_COLUMNS | {"training_flops": "training FLOPs"},
        cell=_cell,
        lowest=min(line["frechet"] for line in comparison.lines),
        sentences=sentences(comparison),
        settings=_settings(comparison),
        grid_png=comparison.grid_png,
        chart_png=figure_png(chart, transparent=True),
    )


def print_table(comparison: Comparison) -> str:
    """The table and what follows from it, as text at most 100 characters wide."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("model", overflow="fold")
    for key in (*TERMINAL_COLUMNS, "training_flops"):
        table.add_column({"expert_rows_per_image": "NFE"}.get(key, _heading(key)), justify="right", no_wrap=True)
    for line in comparison.lines:
        table.add_row(line["model"], *(_cell(key, line) for key in (*TERMINAL_COLUMNS, "training_flops")))
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=False, highlight=False)
    console.print(table)
    for sentence in sentences(comparison):
        console.print(sentence, markup=False)
    return text.getvalue()


def sentences(comparison: Comparison) -> list[str]:
    """The findings in words: each model against the first one, and what isn't alike."""
    first = comparison.lines[0]["model"]
    lines = []
    for difference in comparison.differences:
        pairs = "" if difference.model in comparison.paired else " (other labels or seeds: not paired)"
        lines.append(f"{difference.model} against {first}: {difference_words(asdict(difference))}{pairs}.")
    if settings := _settings(comparison):
        lines.append(f"They were sampled with different {', '.join(settings)}.")
    lines.append("A difference between models that were trained once may also be the luck of a training run.")
    return lines


def _settings(comparison: Comparison) -> dict[str, list[str]]:
    """Settings of sampling that differ, by name: the value of each line."""
    values = {
        name: [f"{line['sampling'].get(name)}" for line in comparison.lines] for name in comparison.lines[0]["sampling"]
    }
    return {name: own for name, own in values.items() if len({*own}) > 1}


def _heading(key: str) -> str:
    return {"training_flops": "FLOPs", "frechet": "distance"}.get(key, MODEL_COLUMNS.get(key, key))


def _cell(key: str, line: dict[str, Any]) -> str:
    return f"{line[key]:.3g}" if key == "training_flops" else cell(key, line)
