"""Charts by matplotlib, as PNG files. matplotlib is imported when a chart is made."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#7a828f", "#3b7dd8", "#d9822b", "#8a56c2", "#2f9e62", "#c94f6d")
LOGARITHMIC_FROM = 20
GREY = "#8a92a0"  # legible on light and on dark paper
MAX_NUMBERED = 16


def figure(width: float, height: float) -> "Figure":
    """An empty figure. `width` and `height` are in hundreds of pixels."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def figure_png(figure: "Figure") -> bytes:
    """The figure as a PNG file, on a transparent ground; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", transparent=True, metadata={"Software": None})
    return buffer.getvalue()


def error_chart(points: Mapping[str, tuple[float, float, float]], x_label: str, y_label: str) -> "Figure":
    """One point per name at (x, y) with an error bar of the third number. x > 0, on a log scale if it varies widely."""
    chart = figure(6.4, 3.0)
    axes = chart.add_subplot()
    for number, (name, (x, y, deviation)) in enumerate(points.items()):
        colour = COLOURS[number % len(COLOURS)]
        axes.errorbar(x, y, deviation, color=colour, marker="o", linewidth=1.5, capsize=3, label=name)
    positions = [x for x, _, _ in points.values()]
    if max(positions) > LOGARITHMIC_FROM * min(positions):
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, 1.1 * max(positions))
    axes.set_xlabel(x_label, color=GREY)
    axes.set_ylabel(y_label, color=GREY)
    plain(axes)
    _legend_beside(axes)
    return chart


def line_chart(series: Mapping[str, Sequence[float]]) -> "Figure":
    """One line per name over equal parts of [0, 1], each point in the middle of its part."""
    chart = figure(6.4, 2.6)
    axes = chart.add_subplot()
    _lines(axes, series)
    _legend_beside(axes)
    return chart


def line_charts(charts: Mapping[str, Mapping[str, Sequence[float]]]) -> "Figure":
    """Charts side by side, each like `line_chart` with a title and a y-axis from 0; a NaN leaves a gap in its line."""
    row = figure(3.2 * len(charts), 2.9)
    for axes, (title, series) in zip(row.subplots(1, len(charts), squeeze=False)[0], charts.items(), strict=True):
        _lines(axes, series)
        axes.set_ylim(bottom=0)
        axes.set_xticks([0, 0.5, 1])
        axes.tick_params(labelsize=9)
        axes.set_title(title, color=GREY, fontsize=11)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False, labelcolor=GREY, fontsize=9)
    return row


def curve_charts(charts: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]) -> "Figure":
    """Charts side by side, each with a title: one line per name through its points, given as (xs, ys)."""
    row = figure(3.6 * len(charts), 2.9)
    for axes, (title, lines) in zip(row.subplots(1, len(charts), squeeze=False)[0], charts.items(), strict=True):
        for number, (name, (xs, ys)) in enumerate(lines.items()):
            axes.plot(xs, ys, color=COLOURS[number % len(COLOURS)], linewidth=2, label=name)
        plain(axes)
        axes.tick_params(labelsize=9)
        axes.set_title(title, color=GREY, fontsize=11)
        axes.legend(loc="upper right", frameon=False, labelcolor=GREY, fontsize=9)
    return row


def heat_map(share_RC: np.ndarray, row_title: str, column_title: str, numbers: Sequence[int] = ()) -> "Figure":
    """Shares in [0, 1] as shades, with percentages for at most MAX_NUMBERED columns; row 0 is at the top.

    `numbers`: of rows and columns; none: from 0.
    """
    num_rows, num_columns = share_RC.shape
    side = 1.4 + 0.55 * min(max(num_rows, num_columns), MAX_NUMBERED)
    picture = figure(side + 0.6, side)
    axes = picture.add_subplot()
    axes.imshow(share_RC, cmap="Blues", vmin=0, vmax=1)
    axes.set_xlabel(column_title, color=GREY)
    axes.set_ylabel(row_title, color=GREY)
    axes.tick_params(colors=GREY, length=0)
    axes.spines[:].set_visible(False)
    if num_columns <= MAX_NUMBERED:
        axes.set_xticks(range(num_columns), [str(number) for number in numbers or range(num_columns)])
        axes.set_yticks(range(num_rows), [str(number) for number in numbers or range(num_rows)])
        for (row, column), share in np.ndenumerate(share_RC):
            ink = "white" if share > 0.5 else "#1d1f24"
            axes.text(column, row, f"{100 * share:.0f}", color=ink, ha="center", va="center", fontsize=9)
    return picture


def _lines(axes: "Axes", series: Mapping[str, Sequence[float]]) -> None:
    for number, (name, values) in enumerate(series.items()):
        middles = (np.arange(len(values)) + 0.5) / len(values)
        axes.plot(middles, values, color=COLOURS[number % len(COLOURS)], linewidth=2, label=name)
    axes.set_xlim(0, 1)
    axes.set_xticks(np.linspace(0, 1, 5))
    plain(axes)


def plain(axes: "Axes") -> None:
    """Draw faint grid lines and no frame."""
    axes.grid(axis="y", color=GREY, alpha=0.3)
    axes.tick_params(which="both", colors=GREY, length=0)
    axes.spines[:].set_visible(False)


def _legend_beside(axes: "Axes") -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, labelcolor=GREY)
