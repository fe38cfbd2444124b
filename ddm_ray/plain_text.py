"""Text that others write, in files and on command lines: one encoding, and one form of each name."""

import unicodedata
from collections.abc import Iterable, Sequence

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of a file that stands for a larger one, which Git LFS has not fetched."""
_MARK = "\ufeff"
"""A byte-order mark, which some editors write before the text."""


def from_utf8(data: bytes) -> str:
    """The text of a file, without a byte-order mark. Raises UnicodeDecodeError unless it is UTF-8."""
    return data.decode("utf-8").removeprefix(_MARK)


def stripped(text: str) -> str:
    """A text without a byte-order mark and without spaces and line ends around it."""
    return text.removeprefix(_MARK).strip()


def words_of_lines(text: str) -> list[str]:
    """The words of a text, without comments: these are from a word that begins with `#` to the end of its line."""
    lines = [line.split() for line in stripped(text).splitlines()]
    comments = [next((place for place, word in enumerate(line) if word.startswith("#")), len(line)) for line in lines]
    return [word for line, end in zip(lines, comments, strict=True) for word in line[:end]]


def name_form(name: str) -> str:
    """A name in the form in which names are compared: Unicode's NFC, stripped. Macs write `é` as two characters."""
    return unicodedata.normalize("NFC", stripped(name))


def index_of(name: str, names: Sequence[str]) -> int | None:
    """The place of a name among others, compared in their common form; None if it isn't there."""
    form = name_form(name)
    return next((place for place, each in enumerate(names) if name_form(each) == form), None)


def name_forms(names: Iterable[str]) -> set[str]:
    """Names in the form in which they are compared."""
    return set(map(name_form, names))
