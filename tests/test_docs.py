"""docs/mixture.md runs from top to bottom, prints what it shows, and draws its figures.

`python -m tests.test_docs` runs the page and writes its outputs and figures anew.
"""

import io
import os
import re
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from PIL import Image

PAGE = Path(__file__).parents[1] / "docs" / "mixture.md"
# A code block, and the output shown under it, if any.
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")


@dataclass(frozen=True)
class Page:
    """A notebook as Markdown: blocks of code in one namespace, each followed by what it prints."""

    text: str

    @cached_property
    def blocks(self) -> list[re.Match[str]]:
        return list(BLOCK.finditer(self.text))

    @property
    def shown(self) -> list[str]:
        """The output shown under each block, empty where there is none."""
        return [block["output"] or "" for block in self.blocks]

    @property
    def figures(self) -> list[str]:
        return re.findall(r"!\[[^]]+\]\(([^)]+)\)", self.text)

    @property
    def prose(self) -> str:
        """The text without blocks of code and output, and without code or formulas in a line."""
        return re.sub(r"```.*?```|\$\$.*?\$\$|`[^`]*`|\$[^$]*\$|\([^()]*://[^()]*\)", " ", self.text, flags=re.DOTALL)

    def run(self, folder: Path) -> list[str]:
        """What each block prints; its files are written to `folder`."""
        namespace: dict[str, object] = {}
        outputs = []
        for block in self.blocks:
            # Empty lines before it, so that a traceback names the page's own line.
            before = self.text[: block.start("code")].count("\n")
            code = compile("\n" * before + block["code"], str(PAGE), "exec")
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


def same(shown: str, printed: str) -> bool:
    """Equal but for numbers, which may differ by 2 % or two units of their last digit."""
    if NUMBER.sub("#", shown).split() != NUMBER.sub("#", printed).split():
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(abs(float(a) - float(b)) <= max(0.02 * abs(float(b)), 2.1 * unit(a)) for a, b in pairs)


def unit(number: str) -> float:
    """One in the last decimal place shown; whole numbers are exact but for the 2 %."""
    return 10.0 ** -len(number.partition(".")[2]) if "." in number else 0.0


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(PAGE.read_text())


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
    for name in page.figures:
        with Image.open(folder / name) as drawn, Image.open(PAGE.parent / name) as committed:
            assert committed.size == drawn.size
            assert len(set(drawn.convert("L").resize((200, 100)).tobytes())) > 20


def test_the_prose_quotes_only_numbers_of_the_blocks(page: Page) -> None:
    numbers = {float(number) for block in page.blocks for number in NUMBER.findall(block[0])}
    quoted = [number for number in NUMBER.findall(page.prose) if "." in number]
    assert quoted
    assert not [number for number in quoted if float(number) not in numbers]


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
    page = Page(PAGE.read_text())
    PAGE.write_text(page.with_outputs(page.run(PAGE.parent)))


if __name__ == "__main__":
    write_anew()
