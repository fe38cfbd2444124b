"""Pages of docs/ that are programs run from top to bottom, print what they show, and draw their figures.

`python -m tests.test_docs` runs the pages and writes their outputs and figures anew.
"""

import io
import os
import re
import sys
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context
from PIL import Image

from tests.conftest import ROOT

DOCS = ROOT / "docs"
# A decimal that each page quotes, and another.
QUOTES = {
    "mixture": ("0.79 of the images stay", "0.45 of the images stay"),
    "science": ("0.62 of the monolith's distance", "0.46 of the monolith's distance"),
}
# A code block, and the output shown under it, if any.
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
INTERVAL = re.compile(r"([\d.]+) \(([\d.]+) to ([\d.]+)")
# Of the prose: notes, formulas, code in a line, links.
LEFT_OUT = re.compile(r"^>.*$|\$\$[^$]*\$\$|`[^`]*`|\$[^$]*\$|\([^()]*://[^()]*\)", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """A notebook as Markdown: blocks of code in one namespace, each followed by what it prints."""

    name: str
    text: str

    @classmethod
    def read(cls, name: str) -> "Page":
        return cls(name, (DOCS / f"{name}.md").read_text())

    @cached_property
    def blocks(self) -> list[re.Match[str]]:
        return list(BLOCK.finditer(self.text))

    @property
    def shown(self) -> list[str]:
        """The output shown under each block, empty where there is none."""
        return [block["output"] or "" for block in self.blocks]

    @property
    def figures(self) -> list[str]:
        """Those that its blocks draw; others lie in a folder."""
        return [picture for picture in self.pictures if "/" not in picture]

    @property
    def pictures(self) -> list[str]:
        return re.findall(r"!\[[^]]+\]\(([^)]+)\)", self.text)

    @property
    def notes(self) -> list[str]:
        """Paragraphs beginning with `>`: what was found elsewhere, which no block shows."""
        return re.findall(r"(?:^>.*\n)+", self.text, re.MULTILINE)

    @property
    def unfounded(self) -> list[str]:
        """Decimals and percentages of the prose that the last output shown before them doesn't have; notes aside."""
        missing, shown, end = [], "", 0
        for block in [*self.blocks, None]:
            numbers = {float(number) for number in NUMBER.findall(shown)}
            prose = self.text[end : block.start() if block else None]
            missing += [number for number in quoted(LEFT_OUT.sub(" ", prose)) if float(number) not in numbers]
            if block:
                shown, end = block["output"] or shown, block.end()
        return missing

    def run(self, folder: Path) -> list[str]:
        """What each block prints; its files are written to `folder`."""
        sys.path.insert(0, str(ROOT / "benchmarks"))  # where a page's blocks find what they import
        try:
            with rc_context():  # the page's style is not other tests'
                return self._run(folder)
        finally:
            sys.path.remove(str(ROOT / "benchmarks"))

    def _run(self, folder: Path) -> list[str]:
        namespace: dict[str, object] = {}
        outputs = []
        for block in self.blocks:
            # Empty lines before it, so that a traceback names the page's own line.
            before = self.text[: block.start("code")].count("\n")
            code = compile("\n" * before + block["code"], f"docs/{self.name}.md", "exec")
            with chdir(folder), redirect_stdout(io.StringIO()) as printed:
                exec(code, namespace)
            outputs.append(printed.getvalue())
        return outputs

    def with_outputs(self, outputs: list[str]) -> str:
        """The page with these outputs under its blocks."""
        text, end = "", 0
        for block, output in zip(self.blocks, outputs, strict=True):
            text += self.text[end : block.start()] + f"```python\n{block['code']}```\n"
            text += f"\n```text\n{output}```\n" if output else ""
            end = block.end()
        return text + self.text[end:]


def quoted(prose: str) -> list[str]:
    """Decimals and percentages, but for those of intervals of 95 %."""
    percentages = [number for number in re.findall(r"([\d.]+) ?%", prose) if number != "95"]
    return percentages + [number for number in NUMBER.findall(prose) if "." in number and number not in percentages]


def same(shown: str, printed: str) -> bool:
    """Equal but for numbers, which may differ by 2 % or two units of their last digit."""
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(abs(float(a) - float(b)) <= max(0.02 * abs(float(b)), 2.1 * unit(a)) for a, b in pairs)


def unit(number: str) -> float:
    """One in the last decimal place shown; whole numbers are exact but for the 2 %."""
    return 10.0 ** -len(number.partition(".")[2]) if "." in number else 0.0


def pixels(path: Path) -> np.ndarray:
    """The picture, 8 of its pixels in one along each side: (rows, columns, 3)."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").reduce(8), dtype=float)


def difference(picture: np.ndarray, of: np.ndarray) -> float:
    """The root of the mean square over `of`'s own about its mean; infinite for another shape."""
    if picture.shape != of.shape:
        return float("inf")
    return float(np.sqrt(np.square(picture - of).mean() / of.var()))


@pytest.fixture(scope="module", params=QUOTES)
def page(request: pytest.FixtureRequest) -> Page:
    return Page.read(request.param)


@pytest.fixture(scope="module")
def run(page: Page, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    import matplotlib

    matplotlib.use("Agg")
    folder = tmp_path_factory.mktemp("page")
    return page.run(folder), folder


def test_the_page_shows_what_its_blocks_print(page: Page, run: tuple[list[str], Path]) -> None:
    printed, _ = run
    assert sum(bool(output) for output in printed) >= 5
    for shown, output in zip(page.shown, printed, strict=True):
        assert same(shown, output), f"shown:\n{shown}\nprinted:\n{output}"


def test_the_page_draws_the_figures_that_it_shows(page: Page, run: tuple[list[str], Path]) -> None:
    _, folder = run
    assert len(page.figures) >= 3
    assert set(page.figures) == {file.name for file in folder.iterdir()}
    drawn = {name: pixels(folder / name) for name in page.figures}
    for name in page.figures:
        committed = pixels(DOCS / name)
        assert difference(drawn[name], committed) < 0.1, name
        others = [np.full_like(committed, committed.mean()), committed[::-1], committed[:, ::-1]]
        others += [other for of, other in drawn.items() if of != name]
        assert min(difference(other, committed) for other in others) > 0.5, name


def test_pictures_that_no_block_draws_can_be_opened(page: Page) -> None:
    for picture in {*page.pictures} - {*page.figures}:
        assert pixels(DOCS / picture).std() > 10, picture


def test_the_prose_quotes_only_what_the_last_output_shows(page: Page) -> None:
    assert not page.unfounded
    quoted, changed = QUOTES[page.name]
    assert page.text.count(quoted) == 1
    assert Page(page.name, page.text.replace(quoted, changed)).unfounded == [changed.split()[0]]


def test_what_no_block_shows_stands_in_notes_that_name_their_source(page: Page) -> None:
    assert page.notes
    for note in page.notes:
        assert "](https://arxiv.org/abs/" in note, note


def test_what_others_quote_of_the_study_stands_on_its_page() -> None:
    shown = "".join(Page.read("science").shown)
    printed = {float(number) for number in NUMBER.findall(shown)}
    sentences = re.split(r"(?<=[.:])\s", (ROOT / "README.md").read_text())
    readme = [number for each in sentences if "](docs/science.md" in each for number in quoted(each)]
    sections = re.split(r"^## ", (ROOT / "benchmarks/RESULTS.md").read_text(), flags=re.MULTILINE)
    studies = [each for each in sections if re.match(r"science.py [a-z-]+, cpu", each)]
    claims = [line.split("|")[2] for each in studies for line in each.splitlines() if line.startswith("| ")]
    results = [number for value in claims for number in quoted(value)]
    assert len(readme) >= 4 and len(results) >= 30
    assert not [number for number in readme + results if float(number) not in printed]
    # A ratio with its interval is one that is printed, whole.
    intervals = [tuple(map(float, each)) for value in claims for each in INTERVAL.findall(value)]
    assert len(intervals) >= 10
    assert {*intervals} <= {tuple(map(float, each)) for each in INTERVAL.findall(shown)}


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [
        ("full 0.0004 .45", "full  0.0005 .45", True),
        ("full 0.0004", "full 0.0009", False),
        ("top-1 1.020", "top-1 1.035", True),
        ("top-1 1.020", "top-1 1.060", False),
        ("full 200", "full 201", True),
        ("full 200", "full 100", False),
        ("full 1.0", "once 1.0", False),
        ("full 1.0", "full 1.0 2.0", False),
    ],
)
def test_a_number_that_drifted_would_be_found(shown: str, printed: str, equal: bool) -> None:
    assert same(shown, printed) is equal


def write_anew() -> None:
    os.environ["MPLBACKEND"] = "Agg"
    for page in map(Page.read, QUOTES):
        (DOCS / f"{page.name}.md").write_text(page.with_outputs(page.run(DOCS)))


if __name__ == "__main__":
    write_anew()
