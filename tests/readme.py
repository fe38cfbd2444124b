"""The README's blocks, as they stand there."""

import re

from tests.conftest import ROOT

README = ROOT / "README.md"


def blocks_of(title: str) -> list[list[str]]:
    """The lines of each block of a section."""
    section = README.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\w*\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert blocks, f"README has no block below {title}"
    return [block.strip().splitlines() for block in blocks]
