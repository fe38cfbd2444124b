"""Words that a mistyped one may have meant. The standard library alone."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that a word is nearest to, whatever its capitals; None if it is near none."""
    by_small_letters = {choice.lower(): choice for choice in choices}
    near = get_close_matches(word.lower(), by_small_letters, n=1, cutoff=0.7)
    return by_small_letters[near[0]] if near else None


def meant(word: str, choices: Iterable[str]) -> str:
    """`; did you mean X?` for the choice that a word is nearest to; empty if it is near none."""
    near = nearest(word, choices)
    return f"; did you mean {near}?" if near is not None else ""
