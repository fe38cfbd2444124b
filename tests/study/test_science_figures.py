"""Figures of a study show its numbers."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from ddm_ray.pictures.figure import COLOURS, figure_png
from tests.study.test_science_page import study


@pytest.fixture
def figures(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("science_figures")


@pytest.fixture
def measured(script: Callable[[str], ModuleType]) -> Any:
    def arms(factor: float) -> dict[str, dict[str, float]]:
        steps = {f"{name}@{at}": factor * 100 / at for name in ("once", "monolith") for at in (20, 40, 60)}
        return {"base": {"monolith": 2 * factor, "once": factor}, "steps": steps, "k2": {"once": 3 * factor}}

    return study(script("science_page"), {0: arms(1.0), 1: arms(4.0)}, seeds={"choosing": [], "reported": [0, 1]})


def test_a_forest_has_each_ratio_with_its_interval_in_a_colour_that_says_where_it_is(
    figures: ModuleType, script: Callable[[str], ModuleType]
) -> None:
    ratio = script("science_page").Ratio
    below, above, around = ratio(0.5, 0.4, 0.6, 3), ratio(2.0, 1.5, 3.0, 3), ratio(1.0, 0.7, 1.4, 3)
    chart = figures.forest({"a": {"once": below, "full": above}, "b": {"full": around}}, {"the paper": 0.72})
    first, second = chart.axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["once", "full"]
    shown = [([*line.get_xdata()], line.get_color()) for line in first.get_lines()]
    assert shown[:4] == [([0.4, 0.6], COLOURS[1]), ([0.5], COLOURS[1]), ([1.5, 3.0], COLOURS[5]), ([2.0], COLOURS[5])]
    assert shown[4][0] == [0.72, 0.72] and first.get_xlabel() == "at 0.72: the paper"
    assert second.get_lines()[0].get_color() == COLOURS[0] and [*second.get_lines()[0].get_ydata()] == [1, 1]
    assert [axes.get_xlim() == first.get_xlim() for axes in chart.axes] == [True, True]
    assert first.get_xlim()[0] < 0.4 and first.get_xlim()[1] > 3.0, "no interval is cut off, whosoever it is"
    assert figure_png(chart).startswith(b"\x89PNG")


@pytest.mark.parametrize(("high", "numbers"), [(1.2, {"0.5", "0.7", "1"}), (3.9, {"0.5", "1", "2", "4"})])
def test_an_axis_of_ratios_has_several_numbers(
    figures: ModuleType, script: Callable[[str], ModuleType], high: float, numbers: set[str]
) -> None:
    chart = figures.forest({"a": {"once": script("science_page").Ratio(0.6, 0.5, high, 3)}}, {"the monolith": 1.0})
    figure_png(chart)
    low, most = chart.axes[0].get_xlim()
    shown = {each.get_text() for each in chart.axes[0].get_xticklabels() if low <= float(each.get_text()) <= most}
    assert shown == numbers


def test_curves_are_of_each_seed_and_of_their_mean(figures: ModuleType, measured: Any) -> None:
    (axes,) = figures.over_steps({"shapes": measured}, ["once"]).axes
    lines = {line.get_label(): [*line.get_ydata()] for line in axes.get_lines()}
    assert lines["once"] == pytest.approx([10.0, 5.0, 10 / 3, 2.0])
    assert lines["monolith"][-1] == pytest.approx(4.0)
    assert len(axes.get_lines()) == 6


def test_ratios_over_clusters_are_in_their_order(figures: ModuleType, measured: Any) -> None:
    (axes,) = figures.over_clusters(measured, {"once": {8: "base/once", 2: "k2/once"}}).axes
    line = axes.get_lines()[0]
    assert [*line.get_xdata()] == [2, 8]
    assert [*line.get_ydata()] == pytest.approx([1.5, 0.5])
