"""Names in lines for people: some of many, and those that a mistyped one may have meant. The standard library alone."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from itertools import islice


def some(names: Collection[str], most: int = 5) -> str:
    """The first `most` names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(islice(names, most)) + more


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that a word is nearest to, whatever its capitals; None if it is near none."""
    by_small_letters = {choice.lower(): choice for choice in choices}
    near = get_close_matches(word.lower(), by_small_letters, n=1, cutoff=0.7)
    return by_small_letters[near[0]] if near else None


def meant(word: str, choices: Iterable[str]) -> str:
    """`; did you mean X?` for the choice that a word is nearest to; empty if it is near none."""
    near = nearest(word, choices)
    return f"; did you mean {near}?" if near is not None else ""
