"""The README's commands, as they stand there."""

import re

from tests.conftest import ROOT


def section(title: str) -> str:
    """The text of a section."""
    return (ROOT / "README.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def commands_of(title: str) -> list[list[str]]:
    """The commands of each block of a section."""
    blocks = re.findall(r"^```\n(.*?)^```", section(title), re.MULTILINE | re.DOTALL)
    return [block.strip().splitlines() for block in blocks]
