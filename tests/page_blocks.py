"""Blocks of the pages of docs/, as docs' readers run them."""

import re
import shlex
from dataclasses import dataclass

from tests.conftest import ROOT

DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"^(?P<unexecuted><!-- not executed -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$"
    r"(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
PROGRAMS = {f"concepts/{name}.md" for name in ("mixture", "mixture-strategies", "mixture-once")} | {"study/science.md"}
"""Pages that are programs: tests of their own run them, and compare all that they print."""


@dataclass(frozen=True)
class Block:
    """A block of a page. `executed`: by a test; what it prints is `output`, where the page shows that."""

    language: str
    text: str
    executed: bool
    output: str


def pages() -> list[str]:
    """Paths below docs/."""
    return sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def blocks_of(page: str) -> list[Block]:
    return [
        Block(
            each["language"],
            each["text"],
            each["language"] in ("sh", "python") and not each["unexecuted"],
            each["output"] or "",
        )
        for each in BLOCK.finditer((DOCS / page).read_text())
    ]


def commands_of(page: str, begin: str = "") -> list[str]:
    """Commands of the block of a page that begins so, or else of all its blocks; continued lines are one."""
    texts = [block.text for block in blocks_of(page) if block.language in ("sh", "shell")]
    chosen = [text for text in texts if text.startswith(begin)] if begin else texts
    assert chosen or not begin, f"{page} has no block that begins with {begin!r}"
    return [line for text in chosen[: 1 if begin else None] for line in text.replace("\\\n", " ").strip().splitlines()]


def words_of(command: str) -> list[str]:
    """Words of a command, without what the shell does with its output."""
    words = shlex.split(command, comments=True)
    ends = [place for place, word in enumerate(words) if word in (">", ">>", "|", "&", "2>&1") or word.startswith("2>")]
    return words[: ends[0]] if ends else words
