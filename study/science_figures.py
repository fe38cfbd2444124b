"""Figures of a study: ratios with their intervals, distances over steps, and over the number of clusters."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ddm_ray.pictures.figure import COLOURS, GREY, figure, plain
from science_page import Ratio, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

NARROW = (0.1, 8.0)
"""Ends of an axis of ratios: an interval of two seeds may be far wider."""
WIDE, BESIDE = 4.0, 1.1
"""Factor between the ends of an axis from which on powers of 2 number it, and what is left free at each end."""


def forest(groups: Mapping[str, Mapping[str, Ratio]], marks: Mapping[str, float]) -> "Figure":
    """Ratios of each group, side by side: a line a name, with its 95 % interval. `marks`: upright lines by name.

    Blue intervals end below 1, red ones begin above it.
    """
    names = list(dict.fromkeys(name for ratios in groups.values() for name in ratios))
    chart = figure(1.8 + 3.0 * len(groups), 1.2 + 0.3 * len(names))
    many = chart.subplots(1, len(groups), squeeze=False, sharex=True, sharey=True)[0]
    ends = _ends([ratio for ratios in groups.values() for ratio in ratios.values()], marks.values())
    for axes, (title, ratios) in zip(many, groups.items(), strict=True):
        for name, ratio in ratios.items():
            at, colour = (
                names.index(name),
                COLOURS[1] if ratio.high < 1 else COLOURS[5] if ratio.low > 1 else COLOURS[0],
            )
            if ratio.count > 1:
                axes.plot([ratio.low, ratio.high], [at, at], color=colour, linewidth=2)
            axes.plot(ratio.mean, at, "o", color=colour, markersize=5)
        for value in marks.values():
            axes.axvline(value, color=GREY, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xlim(*ends)
        _numbered(axes.xaxis, 2.0 if ends[1] > WIDE * ends[0] else 10.0)
        axes.set_title(title, color=GREY, fontsize=11)
        axes.set_xlabel("; ".join(f"at {value:g}: {mark}" for mark, value in marks.items()), color=GREY)
        axes.set_yticks(range(len(names)), names)
        plain(axes)
        axes.grid(axis="x", color=GREY, alpha=0.2)
    many[0].invert_yaxis()
    return chart


def _ends(ratios: Sequence[Ratio], marks: Iterable[float]) -> tuple[float, float]:
    """Ends of an axis that has all of these and a little beside."""
    shown = [*marks, *(ratio.mean for ratio in ratios)]
    shown += [end for ratio in ratios if ratio.count > 1 for end in (ratio.low, ratio.high)]
    return max(NARROW[0], min(shown) / BESIDE), min(NARROW[1], max(shown) * BESIDE)


def over_steps(studies: Mapping[str, Study], strategies: Sequence[str]) -> "Figure":
    """The distance of the monolith and of these strategies after each part of the steps: the mean, and all seeds."""
    chart = figure(4.2 * len(studies), 3.2)
    for axes, (title, study) in zip(chart.subplots(1, len(studies), squeeze=False)[0], studies.items(), strict=True):
        for number, candidate in enumerate((study.plan["against"], *(f"base/{strategy}" for strategy in strategies))):
            _curves(axes, study.curves(candidate), candidate.split("/")[1], COLOURS[number])
        axes.set_yscale("log")
        _numbered(axes.yaxis, 10.0)
        axes.set_title(title, color=GREY, fontsize=11)
        axes.set_xlabel("steps", color=GREY)
        axes.set_ylabel("distance", color=GREY)
        plain(axes)
        axes.legend(frameon=False, labelcolor=GREY, fontsize=9)
    return chart


def over_clusters(study: Study, arms: Mapping[str, Mapping[int, str]]) -> "Figure":
    """The distance of candidates by the number of clusters, a line a name: each seed's over its own monolith's."""
    chart = figure(5.6, 3.2)
    axes = chart.add_subplot()
    for number, (name, candidates) in enumerate(arms.items()):
        ratios = {clusters: study.ratio(candidate) for clusters, candidate in sorted(candidates.items())}
        colour = COLOURS[1 + number]
        axes.plot([*ratios], [ratio.mean for ratio in ratios.values()], "o-", color=colour, linewidth=2, label=name)
        for clusters, ratio in ratios.items():
            axes.plot([clusters, clusters], [ratio.low, ratio.high], color=colour, alpha=0.4, linewidth=2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(max(NARROW[0], axes.get_ylim()[0]), min(NARROW[1], axes.get_ylim()[1]))
    _numbered(axes.xaxis, 2.0)
    _numbered(axes.yaxis, 2.0)
    axes.set_xlabel("clusters, one expert each", color=GREY)
    axes.set_ylabel("distance over the monolith's", color=GREY)
    plain(axes)
    axes.legend(frameon=False, labelcolor=GREY, fontsize=9)
    return chart


def _numbered(axis: "Axis", base: float) -> None:
    """Give a logarithmic axis plain numbers."""
    axis.set_major_locator(LogLocator(base=base, subs=(1.0,) if base == 2 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _curves(axes: "Axes", curves: Mapping[int, Mapping[int, float]], name: str, colour: str) -> None:
    """A line for the geometric mean over seeds, and a faint one for each; curves[seed][step]."""
    steps = [*next(iter(curves.values()))]
    for curve in curves.values():
        axes.plot(steps, [curve[step] for step in steps], color=colour, alpha=0.2, linewidth=1)
    means = [statistics.geometric_mean([curve[step] for curve in curves.values()]) for step in steps]
    axes.plot(steps, means, color=colour, linewidth=2, label=name)
