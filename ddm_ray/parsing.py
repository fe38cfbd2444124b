"""JSON that others wrote, parsed with a bound on its depth: what reads it goes through it level by level."""

import json
from typing import Any

MOST_DEPTH = 64
"""Levels of objects and lists in an object that is read."""


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in these bytes. Raises ValueError for anything else, and for one that is nested too deeply."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        members = (each.values() if isinstance(each, dict) else each for each in level)
        level = [child for each in members for child in each if isinstance(child, dict | list)]
        if not level:
            return value
    raise ValueError("nested too deeply")
