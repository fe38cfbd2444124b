"""Pages in Markdown that are programs: run from top to bottom, they print what they show, and draw their figures."""

import io
import os
import re
import sys
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import rc_context
from PIL import Image

from tests.conftest import ROOT

# A code block, and the output shown under it, if any.
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
INTERVAL = re.compile(r"([\d.]+) \(([\d.]+) to ([\d.]+)")
# Of the prose: notes, formulas, code in a line, links.
LEFT_OUT = re.compile(r"^>.*$|\$\$[^$]*\$\$|`[^`]*`|\$[^$]*\$|\([^()]*://[^()]*\)", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """A notebook as Markdown: blocks of code in one namespace, each followed by what it prints.

    It may go on over several files of a folder; a form feed stands between their texts.
    """

    paths: tuple[Path, ...]
    text: str

    @classmethod
    def read(cls, *names: str) -> "Page":
        """The page of these paths below the root."""
        paths = tuple(ROOT / name for name in names)
        return cls(paths, "\f".join(path.read_text() for path in paths))

    @property
    def folder(self) -> Path:
        return self.paths[0].parent

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
        study = str(ROOT / "study")
        sys.path.insert(0, study)  # where the study's page finds what it imports
        try:
            with rc_context():  # the page's style is not other tests'
                return self._run(folder)
        finally:
            sys.path.remove(study)

    def _run(self, folder: Path) -> list[str]:
        namespace: dict[str, object] = {}
        outputs = []
        for block in self.blocks:
            # Empty lines before it, so that a traceback names the page's own line.
            before = self.text[: block.start("code")].split("\f")
            path = self.paths[len(before) - 1].relative_to(ROOT)
            code = compile("\n" * before[-1].count("\n") + block["code"], str(path), "exec")
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


@dataclass(frozen=True)
class PageRun:
    """A page that was run, what its blocks printed, and the folder that its figures are in."""

    page: Page
    printed: list[str]
    folder: Path

    @classmethod
    def of(cls, page: Page, folder: Path) -> "PageRun":
        matplotlib.use("Agg")
        return cls(page, page.run(folder), folder)

    def check_outputs(self) -> None:
        assert sum(bool(output) for output in self.printed) >= 5
        for shown, output in zip(self.page.shown, self.printed, strict=True):
            assert same(shown, output), f"shown:\n{shown}\nprinted:\n{output}"

    def check_figures(self) -> None:
        figures, beside = self.page.figures, self.page.folder
        assert len(figures) >= 3
        assert set(figures) == {file.name for file in self.folder.iterdir()}
        drawn = {name: pixels(self.folder / name) for name in figures}
        for name in figures:
            committed = pixels(beside / name)
            assert difference(drawn[name], committed) < 0.1, name
            others = [np.full_like(committed, committed.mean()), committed[::-1], committed[:, ::-1]]
            others += [other for of, other in drawn.items() if of != name]
            assert min(difference(other, committed) for other in others) > 0.5, name


def check_text(page: Page, quoted: str, changed: str) -> None:
    """Pictures can be opened, prose quotes outputs alone, notes name their source; `quoted`: words that it has once.

    `changed`: the same with another decimal, which would be found.
    """
    for picture in {*page.pictures} - {*page.figures}:
        assert pixels(page.folder / picture).std() > 10, picture
    assert not page.unfounded
    assert page.text.count(quoted) == 1
    assert Page(page.paths, page.text.replace(quoted, changed)).unfounded == [changed.split()[0]]
    assert page.notes
    for note in page.notes:
        assert "](https://arxiv.org/abs/" in note, note


def write_anew(page: Page) -> None:
    os.environ["MPLBACKEND"] = "Agg"
    texts = page.with_outputs(page.run(page.folder)).split("\f")
    for path, text in zip(page.paths, texts, strict=True):
        path.write_text(text)
