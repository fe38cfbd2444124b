"""Pages escape what they are given and miss nothing; charts draw what they are given."""

import io

import jinja2
import numpy as np
import pytest
from PIL import Image

from ddm_ray.pictures import page as pages
from ddm_ray.pictures.figure import MAX_NUMBERED, figure_png, heat_map, line_chart, line_charts
from ddm_ray.pictures.page import render_page


def test_a_page_escapes_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    template = '{% from "figure.html" import figure %}{{ text }}{{ figure(png, text) }}'
    loader = jinja2.DictLoader({"x.html": template})
    both = jinja2.ChoiceLoader([loader, pages._environment().loader])
    monkeypatch.setattr(pages._environment(), "loader", both)
    text = render_page("x", text='<b> & "', png=b"\xff\xfb\xfe")
    assert text.startswith("&lt;b&gt; &amp; &#34;<figure>")
    assert 'alt="&lt;b&gt; &amp; &#34;" src="data:image/png;base64,//v+"' in text
    with pytest.raises(jinja2.UndefinedError, match="text"):
        render_page("x", png=b"")


def test_a_chart_has_each_point_in_the_middle_of_its_part() -> None:
    chart = line_chart({"flat": [1.0, 1.0], "rising": [1.0, 2.0, 4.0, 3.0]})
    flat, rising = chart.axes[0].lines
    np.testing.assert_allclose(flat.get_xydata(), [[0.25, 1], [0.75, 1]])
    np.testing.assert_allclose(rising.get_xydata(), [[0.125, 1], [0.375, 2], [0.625, 4], [0.875, 3]])
    assert [text.get_text() for text in chart.axes[0].get_legend().get_texts()] == ["flat", "rising"]
    assert Image.open(io.BytesIO(figure_png(chart))).size == (640, 260)
    assert figure_png(chart) == figure_png(chart)


def test_charts_side_by_side_keep_their_gaps_and_begin_at_zero() -> None:
    row = line_charts({"left": {"gap": [1.0, float("nan"), 3.0]}, "right": {"a": [5.0], "b": [6.0]}})
    assert [axes.get_title() for axes in row.axes] == ["left", "right"]
    np.testing.assert_array_equal(row.axes[0].lines[0].get_ydata(), [1, np.nan, 3])
    assert [axes.get_ylim()[0] for axes in row.axes] == [0, 0]
    assert [text.get_text() for text in row.axes[1].get_legend().get_texts()] == ["a", "b"]


def test_a_heat_map_numbers_its_cells_while_they_are_few() -> None:
    few = heat_map(np.array([[0.9, 0.1], [0.25, 0.75]]), "true", "likeliest")
    np.testing.assert_array_equal(few.axes[0].images[0].get_array(), [[0.9, 0.1], [0.25, 0.75]])
    numbers = {text.get_position(): text.get_text() for text in few.axes[0].texts}
    assert numbers == {(0, 0): "90", (1, 0): "10", (0, 1): "25", (1, 1): "75"}, "by column and row"
    many = heat_map(np.eye(MAX_NUMBERED + 1), "true", "likeliest")
    assert not many.axes[0].texts and many.axes[0].images[0].get_array().sum() == MAX_NUMBERED + 1
