"""Patterns of paths: `*` and `?` within a name, `**/` for any folders, `{a,b}` and `{000..127}` for alternatives."""

import re
from itertools import product

from ddm_ray.errors import DataError

_BRACES = re.compile(r"\{([^{}]*)\}")
_WILD = re.compile(r"[*?{]")


def is_wild(text: str) -> bool:
    """True if a text has wildcards or braces."""
    return bool(_WILD.search(text))


def expand_braces(pattern: str) -> list[str]:
    """All texts that a pattern's `{a,b}` and `{000..127}` expand to, in order. Raises DataError for a wrong range."""
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
        if int(first) > int(last):
            raise DataError(f"data.source has {{{text}}}, which counts down; write {{{last}..{first}}}")
        return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return text.split(",")
