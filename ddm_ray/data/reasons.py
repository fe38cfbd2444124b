"""The most common reasons why rows can't be used."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

MAX_REASONS = 10
CUT = "tar ends early or is damaged"
"""Start of the reason of a row that represents everything lost from such a file."""


def commonest(rejected: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """{id, reason, rows} of CUT and the most common reasons, MAX_REASONS in total.

    Reasons that differ only in numbers or quoted words count as one, in the wording of the first. `rejected`:
    {id, reason} of one row each, or results of this function.
    """
    rows: Counter[str] = Counter()
    first: dict[str, Mapping[str, Any]] = {}
    for row in rejected:
        kind = re.sub(r"'[^']*'|\d+", "#", row["reason"])
        rows[kind] += row.get("rows", 1)
        first.setdefault(kind, row)
    order = sorted(rows, key=lambda kind: (not kind.startswith(CUT), -rows[kind]))
    return [{**first[kind], "rows": rows[kind]} for kind in order[:MAX_REASONS]]
