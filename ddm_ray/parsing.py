"""Untrusted JSON, parsed with a limit on its depth, since its readers are recursive."""

import json
from typing import Any

MAX_DEPTH = 64
"""Largest number of nested objects and lists."""


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in these bytes. Raises ValueError for anything else, and for an object nested too deeply."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        members = (each.values() if isinstance(each, dict) else each for each in level)
        level = [child for each in members for child in each if isinstance(child, dict | list)]
        if not level:
            return value
    raise ValueError("nested too deeply")
