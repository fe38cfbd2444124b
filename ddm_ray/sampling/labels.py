"""Labels: a class by its name or number. Imports no torch, so that commands check labels before they load networks."""

import operator
from collections.abc import Sequence
from typing import Any

from ddm_ray.errors import SamplingError
from ddm_ray.plain_text import index_of
from ddm_ray.spelling import meant

Label = int | str | None
Prompt = str | None


def integer(value: Any) -> int | None:
    """A whole number of Python's, numpy's or torch's as an int; None for all else, True and False too."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):
        return None


def class_number(label: Label, names: Sequence[str], num_classes: int) -> int:
    """The number of a class; None is the null condition, `num_classes`. Raises SamplingError for an unknown one."""
    if label is None:
        return num_classes
    place = index_of(label, names) if isinstance(label, str) else None
    if place is not None:
        return place
    number = integer(label)
    if number is not None and 0 <= number < num_classes:
        return number
    known = f"a name ({', '.join(names[:12])}{', ...' if len(names) > 12 else ''}) or " if names else ""
    numbers = f"a number from 0 to {num_classes - 1}"
    raise SamplingError(f"unknown class {label!r}: use {known}{numbers}{meant(str(label), names)}")
