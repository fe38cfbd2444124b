"""Converts what a source states about an image to its condition: a label of the run's classes, or a caption."""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property

from ddm_ray.config import DataConfig
from ddm_ray.plain_text import name_form, places, stripped

CLASSES = ("label", "labels", "fine_label", "class", "cls")
TEXTS = ("text", "caption", "prompt")
"""Usual names of columns that state a class or a text; the first one that is there counts."""
CLASS_KEYS, TEXT_KEYS = ("label", "cls", "class", "labels", "fine_label"), ("caption", "text", "prompt")
"""Usual keys in JSON; the first one that is there counts."""
MAX_LETTERS = 2**16
"""Maximum length of a caption."""
_NUMBER = re.compile(r"([+-]?\d{1,18})(?:\.0*)?")
"""A label that is written as a text: the 3, 03 or 3.0 of a table."""


@dataclass(frozen=True)
class Conditions:
    """The conditions of a run: classes by name or number, or captions.

    `classes`: the source's names for classes that the run only counts. `numbered`: names of the classes that the source
    numbers 0, 1, ...; None: its numbers are the run's labels.
    """

    config: DataConfig
    classes: tuple[str, ...] | None = None
    numbered: tuple[str, ...] | None = None

    @property
    def captions(self) -> bool:
        """True if conditions are texts."""
        return self.config.text is not None

    @property
    def needed(self) -> bool:
        """True if rows need a label or caption; False for runs with a single class."""
        return self.captions or self.num_classes > 1

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 for captions."""
        return len(self.config.class_names)

    @property
    def counted(self) -> bool:
        """True if the run only counts its classes, without names."""
        return self.config.classes_are_counted

    def of(self, stated: object) -> int | str:
        """The condition for a source's label, class name or caption.

        Raises ValueError with the reason if there is none.
        """
        stated = stripped(stated) if isinstance(stated, str) else _whole_number(stated)
        if isinstance(stated, str) and "\0" in stated:
            raise ValueError(f"{stated!r:.60} has NUL characters, as UTF-16 read as UTF-8 has; convert it to UTF-8")
        if self.captions:
            if not isinstance(stated, str) or not stated:
                raise ValueError("no caption" if stated is None or isinstance(stated, str) else "caption is not a text")
            if len(stated) > MAX_LETTERS:
                raise ValueError(f"caption has {len(stated)} letters, more than {MAX_LETTERS}")
            return _in_utf8(stated)
        if not self.needed:
            return 0
        if stated is None or stated == "":
            raise ValueError("no label")
        if isinstance(stated, str):
            return self._by_name(stated)
        if not isinstance(stated, int):
            raise ValueError(f"label {stated!r:.60} is neither a number nor a class's name")
        num_classes = self.num_classes if self.numbered is None else len(self.numbered)
        if not 0 <= stated < num_classes:
            raise ValueError(f"label {int(stated)} is not in 0..{num_classes - 1}")
        return int(stated) if self.numbered is None else self._by_name(self.numbered[stated])

    def number_or_name(self, text: str) -> int | str:
        """The number that a label's file states, also written as 3.0 unless a class is called so; or else the text."""
        number = _NUMBER.fullmatch(text)
        return text if not number or ("." in text and name_form(text) in self._labels) else int(number[1])

    def _by_name(self, name: str) -> int:
        label = self._labels.get(name_form(name))
        if label is not None:
            return label
        if not self.counted or self.classes is not None:
            raise ValueError(f"{name!r:.60} is none of the {self.num_classes} classes")
        if number := _NUMBER.fullmatch(name):
            return int(self.of(int(number[1])))
        fix = "name them: data.class_names=[A, B, ...]"
        raise ValueError(f"{name!r:.60} is none of the {self.num_classes} classes; {fix}")

    @cached_property
    def _labels(self) -> dict[str, int]:
        return places(self.classes or self.config.class_names)


def _whole_number(stated: object) -> object:
    """A whole number of another type as int: the 3.0 of a column with gaps. NaN states nothing."""
    if not isinstance(stated, float | Decimal):
        return stated
    if math.isnan(stated):
        return None
    return int(stated) if math.isfinite(stated) and stated == int(stated) else stated


def _in_utf8(caption: str) -> str:
    try:
        caption.encode()
    except UnicodeEncodeError:
        raise ValueError("caption is not UTF-8") from None
    return caption
