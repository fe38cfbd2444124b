"""Why rows can't be used, in a few lines."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

MOST = 10
CUT = "tar ends early or is damaged"
"""Begins the reason of a row that stands for all that such a file has lost."""


def commonest(rejected: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """{id, reason, rows} of CUT and the commonest reasons, MOST in all, each as one row's has it: numbers may differ.

    `rejected`: {id, reason} of one row each, or what this gave of some.
    """
    rows: Counter[str] = Counter()
    first: dict[str, Mapping[str, Any]] = {}
    for row in rejected:
        kind = re.sub(r"'[^']*'|\d+", "#", row["reason"])
        rows[kind] += row.get("rows", 1)
        first.setdefault(kind, row)
    order = sorted(rows, key=lambda kind: (not kind.startswith(CUT), -rows[kind]))
    return [{**first[kind], "rows": rows[kind]} for kind in order[:MOST]]
