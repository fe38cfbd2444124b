"""Charts by matplotlib, as PNG files. Only making one needs it."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#7a828f", "#3b7dd8", "#d9822b", "#8a56c2", "#2f9e62", "#c94f6d")
GREY = "#8a92a0"  # to be read on light and on dark paper


def figure(width: float, height: float) -> "Figure":
    """An empty figure of so many hundreds of pixels each way."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def figure_png(figure: "Figure", transparent: bool = False) -> bytes:
    """The figure as a PNG file; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", transparent=transparent, metadata={"Software": None})
    return buffer.getvalue()


def error_chart(points: Mapping[str, tuple[float, float, float]], x_label: str, y_label: str) -> "Figure":
    """A point a name at (x, y) with a bar of the third number up and down; x > 0 is on a logarithmic scale."""
    chart = figure(6.4, 3.0)
    axes = chart.add_subplot()
    for number, (name, (x, y, deviation)) in enumerate(points.items()):
        colour = COLOURS[number % len(COLOURS)]
        axes.errorbar(x, y, deviation, color=colour, marker="o", linewidth=1.5, capsize=3, label=name)
    axes.set_xscale("log")
    axes.set_xlabel(x_label, color=GREY)
    axes.set_ylabel(y_label, color=GREY)
    _plain(axes)
    return chart


def line_chart(series: Mapping[str, Sequence[float]]) -> "Figure":
    """One line per name over equal parts of [0, 1], each point in the middle of its part."""
    chart = figure(6.4, 2.6)
    axes = chart.add_subplot()
    for number, (name, values) in enumerate(series.items()):
        middles = (np.arange(len(values)) + 0.5) / len(values)
        axes.plot(middles, values, color=COLOURS[number % len(COLOURS)], linewidth=2, label=name)
    axes.set_xlim(0, 1)
    axes.set_xticks(np.linspace(0, 1, 5))
    _plain(axes)
    return chart


def _plain(axes: "Axes") -> None:
    """Faint lines, no frame, and a legend beside."""
    axes.grid(axis="y", color=GREY, alpha=0.3)
    axes.tick_params(which="both", colors=GREY, length=0)
    axes.spines[:].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, labelcolor=GREY)
