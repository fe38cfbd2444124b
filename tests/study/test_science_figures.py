"""Figures of a study show its numbers."""

from collections.abc import Callable
from types import ModuleType

import pytest

from ddm_ray.pictures.figure import COLOURS, figure_png


@pytest.fixture
def figures(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("science_figures")


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
