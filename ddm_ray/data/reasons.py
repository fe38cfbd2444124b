"""Why rows can't be used, in a few lines."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

MOST = 10


def commonest(rejected: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """{id, reason, rows} of the MOST commonest reasons, each as one row's has it: numbers and quoted words differ.

    `rejected`: {id, reason} of one row each, or what this gave of some.
    """
    rows: Counter[str] = Counter()
    first: dict[str, Mapping[str, Any]] = {}
    for row in rejected:
        kind = re.sub(r"'[^']*'|\d+", "#", row["reason"])
        rows[kind] += row.get("rows", 1)
        first.setdefault(kind, row)
    return [{**first[kind], "rows": count} for kind, count in rows.most_common(MOST)]
