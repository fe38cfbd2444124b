"""Formulas as pictures in the page, drawn by matplotlib while the site is built: no page loads a script for them.

GitHub draws the same `$...$`. What matplotlib can't draw is a warning, which ends a strict build.
"""

import logging
import re
from html import escape, unescape
from typing import Any

from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath, text_to_path
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.formulas")
# What pymdownx.arithmatex makes of a formula, with its option `generic`.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)
SIZE = 10.0
"""Of the letters, in points; the page scales by `em`."""
LETTERS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}
"""SVG's, of the parts of a path."""


def on_page_content(html: str, page: Page, **_: Any) -> str:
    def drawn(formula: re.Match[str]) -> str:
        text = " ".join(unescape(formula[2]).split())
        try:
            picture = svg(text)
        except ValueError as error:
            log.warning("%s: %s: %s", page.file.src_uri, text, error)
            return escape(text)
        return f'<p class="formula">{picture}</p>' if formula[1] == "div" else picture

    return FORMULA.sub(drawn, html)


def svg(formula: str) -> str:
    """The formula in the colour of the text around it, on its line."""
    font = FontProperties(size=SIZE, math_fontfamily="cm")
    width, height, depth = text_to_path.get_text_width_height_descent(f"${formula}$", font, ismath=True)
    words = []
    for points, code in TextPath((0, 0), f"${formula}$", prop=font).iter_segments(simplify=False):
        ends = " ".join(f"{x:.2f} {-y:.2f}" for x, y in points.reshape(-1, 2))
        words.append(LETTERS[code] + ("" if code == Path.CLOSEPOLY else ends))
    style = f"width:{width / SIZE:.3f}em;height:{height / SIZE:.3f}em;vertical-align:{-depth / SIZE:.3f}em"
    return (
        f'<svg class="formula" role="img" aria-label="{escape(formula)}" style="{style}" fill="currentColor" '
        f'viewBox="0 {depth - height:.2f} {width:.2f} {height:.2f}"><path d="{"".join(words)}"/></svg>'
    )
