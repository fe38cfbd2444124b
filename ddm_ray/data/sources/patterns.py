"""Patterns of paths: `*` and `?` within a name, `**/` for any folders, `{a,b}` and `{000..127}` for alternatives."""

import re
from itertools import product

_BRACES = re.compile(r"\{([^{}]*)\}")
_WILD = re.compile(r"[*?{]")


def is_wild(text: str) -> bool:
    """True if a text has wildcards or braces."""
    return bool(_WILD.search(text))


def expand_braces(pattern: str) -> list[str]:
    """All texts that a pattern's `{a,b}` and `{000..127}` expand to, in order."""
    parts = _BRACES.split(pattern)
    choices = [[text] if index % 2 == 0 else _choices(text) for index, text in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def regular(pattern: str) -> re.Pattern[str]:
    """A regular expression for a pattern without braces."""
    text = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    return re.compile(text)


def _choices(text: str) -> list[str]:
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        first, last = match.groups()
        return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return text.split(",")
