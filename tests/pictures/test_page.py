"""Pages escape what they are given and miss nothing; charts draw what they are given."""

import io

import jinja2
import numpy as np
import pytest
from PIL import Image

from ddm_ray.pictures import page as pages
from ddm_ray.pictures.figure import figure_png, line_chart
from ddm_ray.pictures.page import page


def test_a_page_escapes_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    template = '{% from "figure.html" import figure %}{{ text }}{{ figure(png, text) }}'
    loader = jinja2.DictLoader({"x.html": template})
    both = jinja2.ChoiceLoader([loader, pages._environment().loader])
    monkeypatch.setattr(pages._environment(), "loader", both)
    text = page("x", text='<b> & "', png=b"\xff\xfb\xfe")
    assert text.startswith("&lt;b&gt; &amp; &#34;<figure>")
    assert 'alt="&lt;b&gt; &amp; &#34;" src="data:image/png;base64,//v+"' in text
    with pytest.raises(jinja2.UndefinedError, match="text"):
        page("x", png=b"")


def test_a_chart_has_each_point_in_the_middle_of_its_part() -> None:
    chart = line_chart({"flat": [1.0, 1.0], "rising": [1.0, 2.0, 4.0, 3.0]})
    flat, rising = chart.axes[0].lines
    np.testing.assert_allclose(flat.get_xydata(), [[0.25, 1], [0.75, 1]])
    np.testing.assert_allclose(rising.get_xydata(), [[0.125, 1], [0.375, 2], [0.625, 4], [0.875, 3]])
    assert [text.get_text() for text in chart.axes[0].get_legend().get_texts()] == ["flat", "rising"]
    assert Image.open(io.BytesIO(figure_png(chart))).size == (640, 260)
    assert figure_png(chart) == figure_png(chart)
