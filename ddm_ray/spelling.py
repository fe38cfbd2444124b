"""Text for people: untrusted text made printable, lines for a shell, lists, sizes, and guesses at mistyped words."""

import os
import shlex
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from itertools import islice


def some(names: Collection[str], most: int = 5) -> str:
    """The first `most` names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(islice(names, most)) + more


def numbered(word: str, numbers: Collection[int], most: int = 5) -> str:
    """A thing by its number, or several: `expert 3`, `experts 0 to 2, 4`."""
    return f"{word}{'s' if len(numbers) > 1 else ''} {numbers_in_words(numbers, most)}"


def numbers_in_words(numbers: Iterable[int], most: int = 20) -> str:
    """Numbers in order, with ranges for those that follow each other: `0 to 2, 4`."""
    spans = list[list[int]]()
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return some([" to ".join(map(str, span)) for span in spans], most)


def closest_match(word: str, choices: Iterable[str]) -> str | None:
    """The choice that is most similar to a word, regardless of case; None if no choice is similar."""
    by_small_letters = {choice.lower(): choice for choice in choices}
    near = get_close_matches(word.lower(), by_small_letters, n=1, cutoff=0.7)
    return by_small_letters[near[0]] if near else None


def meant(word: str, choices: Iterable[str]) -> str:
    """`; did you mean X?` for the choice that is most similar to a word; empty if no choice is similar."""
    near = closest_match(word, choices)
    return f"; did you mean {near}?" if near is not None else ""


def one_line(what: object, limit: int | None = None, *, tail: bool = False) -> str:
    """A text, or an error's text, as one line of at most `limit` characters; with `tail`, the last ones.

    An error without text gives the name of its class.
    """
    text = " ".join(str(what).split()) or (type(what).__name__ if isinstance(what, BaseException) else "")
    return text if limit is None else text[-limit:] if tail else text[:limit]


def printable(what: object, limit: int) -> str:
    """Untrusted text as one line of at most `limit` printable characters."""
    return escape_unprintable(one_line(what, limit))[:limit]


def escape_unprintable(text: str) -> str:
    """Untrusted text that is safe for a terminal: each character that Unicode doesn't call printable becomes its code.

    These are C0 and C1 controls, line ends, and marks that reverse the direction of text.
    """
    if text.isprintable():  # as a report's megabytes of pictures are
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def shell_line(*words: str) -> str:
    """A command as a line that a person can paste into a shell: each word that needs it is quoted."""
    return " ".join(map(_shell_word, words))


def _shell_word(word: str) -> str:
    if word.isprintable() and "; " not in word:  # a semicolon would end a part of a message
        return shlex.quote(word)
    return f"$'{''.join(map(_escaped, word))}'"


def _escaped(letter: str) -> str:
    """A letter within `$'...'`: its bytes as codes if the shell, a terminal or our messages would read it otherwise."""
    plain = letter.isprintable() and letter not in "\\';"
    return letter if plain else "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter))


def amount(value: float, unit: str = "B") -> str:
    """A number with three digits and its unit, as `1.25 GB`."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # 999.5 rounds to 1,000, which is 1 of the next unit
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def duration(seconds: float) -> str:
    """A duration for people: seconds up to ten minutes, then minutes, hours, days."""
    for unit, size, most in (("s", 1, 600), ("min", 60, 7200), ("h", 3600, 48 * 3600)):
        if seconds < most:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.1f} days"
