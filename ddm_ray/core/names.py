"""Names that configurations use and the mathematics implements, and the grammar of those that carry numbers.

The standard library alone: `config` reads this file too, and must not load torch.
"""

import math
import re
from collections.abc import Callable
from typing import Literal

PathName = Literal["linear", "cosine", "ddpm"]
PredictionName = Literal["velocity", "noise", "data", "score"]
TimeDistribution = Literal["uniform", "logit-normal", "discrete"]
ScheduleName = Literal["constant", "cosine", "linear", "inverse-sqrt"]
SOLVER, STEPS, TIMES = "ab2", 25, "uniform"
"""Defaults of sampling."""
GuidanceKind = Literal["mixture", "per-expert"]
FitName = Literal["crop", "pad", "squash"]

COUNT, NUMBER = r"([1-9]\d{0,8})", r"(\d{1,20}(?:\.\d{1,20})?)"

STRATEGIES: dict[str, tuple[str, Callable[..., bool]]] = {
    "once": ("once", lambda K: True),
    "full": ("full", lambda K: True),
    "oracle": ("oracle", lambda K: True),
    "top": (f"top-{COUNT}", lambda K, kept: kept <= K),
    "sample": (f"sample-{COUNT}", lambda K, drawn: drawn <= K),
    "sticky": (f"sticky(?:-{NUMBER})?", lambda K, margin=0.0: margin < 1),
    "threshold": (f"threshold-{NUMBER}", lambda K, least: 0 < least < 1),
    "nucleus": (f"nucleus-{NUMBER}(?:-{NUMBER})?", lambda K, mass, T=1.0: 0 < mass <= 1 and T > 0),
}
"""Kind of strategy -> the form of its names, and whether the numbers in one are in range for K experts.

Defaults here only let a number be left out; `routing.KINDS` makes the strategy, with the class's own defaults.
"""


def parse_strategy_name(name: str, num_experts: int | None = None) -> tuple[str, tuple[float, ...]]:
    """Kind and numbers of a strategy's name: top-2 is ("top", (2.0,)).

    Without `num_experts` any k is in range. Raises ValueError, which lists the forms.
    """
    for kind, (form, in_range) in STRATEGIES.items():
        if match := re.fullmatch(form, name):
            numbers = tuple(float(text) for text in match.groups() if text is not None)
            if in_range(num_experts or math.inf, *numbers):
                return kind, numbers
    mixture, most = (f" for {num_experts} experts", f" to {num_experts}") if num_experts else ("", "")
    raise ValueError(
        f"unknown strategy {name!r:.60}{mixture}: use once, full, oracle, top-k or sample-k (k from 1{most}), sticky-M"
        " (M in [0, 1)), threshold-P (P in (0, 1)), nucleus-P or nucleus-P-T (P in (0, 1], temperature T above 0)"
    )


def parse_time_grid(name: str) -> tuple[str, float]:
    """Kind and shift of a time grid's name: shifted-3 is ("shifted", 3.0), uniform is ("uniform", 1.0).

    Raises ValueError, which lists the forms.
    """
    if name in ("uniform", "cosine"):
        return name, 1.0
    if (match := re.fullmatch(f"shifted-{NUMBER}", name)) and float(match[1]) > 0:
        return "shifted", float(match[1])
    raise ValueError(f"unknown times {name!r:.60}: use uniform, cosine or shifted-S with a number S above 0")
