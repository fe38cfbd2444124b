"""Text that others write, in files and on command lines: one encoding, and one form of each name."""

import re
import unicodedata
from collections.abc import Sequence

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of a file that stands for a larger one, which Git LFS has not fetched."""
NOT_FETCHED = "a pointer of Git LFS, not the file itself; fetch it: git lfs pull"
_MARK = "\ufeff"
"""A byte-order mark, which some editors write before the text."""


def from_utf8(data: bytes) -> str:
    """The text of a file, without a byte-order mark. Raises UnicodeDecodeError unless it is UTF-8."""
    return data.decode("utf-8-sig")


def stripped(text: str) -> str:
    """A text without a byte-order mark and without spaces and line ends around it."""
    return text.removeprefix(_MARK).strip()


def words_of_lines(text: str) -> list[str]:
    """The words of a text, without comments: these are from a word that begins with `#` to the end of its line."""
    return [word for line in text.splitlines() for word in re.split(r"(?:^|\s)#", line)[0].split()]


def name_form(name: str) -> str:
    """A name in the form in which names are compared: Unicode's NFC, stripped. Macs write `é` as two characters."""
    return unicodedata.normalize("NFC", stripped(name))


def index_of(name: str, names: Sequence[str]) -> int | None:
    """The place of a name among others, compared in their common form; None if it isn't there."""
    return places(names).get(name_form(name))


def places(names: Sequence[str]) -> dict[str, int]:
    """The place of each name, the first one of several, by the form in which names are compared."""
    return {name_form(name): place for place, name in reversed([*enumerate(names)])}
