"""Lines for people: texts of others in them, some of many names, sizes, and what a mistyped word may have meant."""

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


def one_line(what: object, limit: int | None = None, *, tail: bool = False) -> str:
    """A text or an error's text as one line of at most `limit` characters, the last ones with `tail`.

    An error that says nothing is named by its class.
    """
    text = " ".join(str(what).split()) or (type(what).__name__ if isinstance(what, BaseException) else "")
    return text if limit is None else text[-limit:] if tail else text[:limit]


def printable(what: object, limit: int) -> str:
    """A text of others as one line of at most `limit` characters, which tells a terminal nothing but letters."""
    return spelled_out(one_line(what, limit))[:limit]


def spelled_out(text: str) -> str:
    """A text of others, which tells a terminal nothing but letters and blanks: what does more is shown by its code.

    That is what Unicode doesn't call printable: controls of C0 and C1, ends of lines, and what turns text around.
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def amount(value: float, unit: str = "B") -> str:
    """A number of three digits with its unit, as `1.25 GB`."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # what rounds to 1,000 is 1 of the next
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def duration(seconds: float) -> str:
    """A time for people: seconds up to ten minutes, then minutes, hours, days."""
    for unit, size, most in (("s", 1, 600), ("min", 60, 7200), ("h", 3600, 48 * 3600)):
        if seconds < most:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.1f} days"
