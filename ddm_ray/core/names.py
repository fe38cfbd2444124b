"""Names that configurations use and the mathematics implements, and the grammar of those that carry numbers.

The standard library alone: `config` reads this file too, and must not load torch.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
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


@dataclass(frozen=True)
class StrategyForm:
    """A kind of strategy: the `pattern` of its names, `words` and an `example` for people.

    `code`: the name of its class, which isn't imported here, since it needs torch. `fits`: whether the numbers in a
    name are in range for K experts. `teaches`: it needs nothing but the probabilities of a row's experts, so that it
    can say what a student learns. `asked`: a request may name it; else only a program can. `number`: the type of the
    numbers; those that a name leaves out are the class's own.
    """

    pattern: str
    words: str
    example: str
    code: str
    fits: Callable[..., bool] = lambda K: True
    teaches: bool = False
    asked: bool = True
    number: type[int] | type[float] = float


_CODE = "ddm_ray.core.routing:"
STRATEGIES = {
    "once": StrategyForm("once", "once", "once", f"{_CODE}Once"),
    "full": StrategyForm("full", "full", "full", f"{_CODE}Full", teaches=True),
    "oracle": StrategyForm("oracle", "oracle", "oracle", f"{_CODE}Oracle", asked=False),
    "top": StrategyForm(
        f"top-{COUNT}",
        "top-k (k from 1{most})",
        "top-2",
        f"{_CODE}TopK",
        lambda K, kept: kept <= K,
        teaches=True,
        number=int,
    ),
    "sample": StrategyForm(
        f"sample-{COUNT}",
        "sample-k (k from 1{most})",
        "sample-1",
        f"{_CODE}SampleK",
        lambda K, drawn: drawn <= K,
        number=int,
    ),
    "sticky": StrategyForm(
        f"sticky(?:-{NUMBER})?", "sticky-M (M in [0, 1))", "sticky", f"{_CODE}Sticky", lambda K, margin=0.0: margin < 1
    ),
    "threshold": StrategyForm(
        f"threshold-{NUMBER}",
        "threshold-P (P in (0, 1))",
        "threshold-0.1",
        f"{_CODE}Threshold",
        lambda K, least: 0 < least < 1,
        teaches=True,
    ),
    "nucleus": StrategyForm(
        f"nucleus-{NUMBER}(?:-{NUMBER})?",
        "nucleus-P or nucleus-P-T (P in (0, 1], temperature T above 0)",
        "nucleus-0.9",
        f"{_CODE}Nucleus",
        lambda K, mass, T=1.0: 0 < mass <= 1 and T > 0,
        teaches=True,
    ),
}
"""The kinds of strategies; a new one is a class of `core.routing.Strategy` and an entry here.

A program may add its own. Another package registers a StrategyForm, so that every command knows it:

    [project.entry-points."ddm_ray.strategies"]
    even = "my_package.even:EVEN"
"""
STRATEGY_GROUP = "ddm_ray.strategies"
_SHIPPED = frozenset(STRATEGIES)


def strategy_form(kind: str) -> StrategyForm:
    """The form of a kind that `parse_strategy_name` returned."""
    return STRATEGIES.get(kind) or strategies_of_packages()[kind]


@cache
def strategies_of_packages() -> Mapping[str, StrategyForm]:
    """Kinds that other installed packages register. ValueError naming a package for one that can't be used."""
    forms: dict[str, StrategyForm] = {}
    for entry in sorted(entry_points(group=STRATEGY_GROUP), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist else "unknown"
        where = f"strategy {entry.name}: {entry.value}, of the package {package},"
        if entry.name in _SHIPPED or entry.name in forms:
            raise ValueError(f"{where} has a name that is taken; uninstall the package")
        try:
            form = entry.load()
        except Exception as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{where} can't be imported ({why:.200}); mend it, or uninstall it") from None
        if not isinstance(form, StrategyForm):
            raise ValueError(f"{where} isn't a StrategyForm; mend it, or uninstall it")
        forms[entry.name] = form
    return forms


def _strategy_forms() -> Iterator[tuple[str, StrategyForm]]:
    yield from tuple(STRATEGIES.items())
    # Last, so that other packages are imported only for a name that isn't in the table.
    yield from strategies_of_packages().items()


def parse_strategy_name(name: str, num_experts: int | None = None) -> tuple[str, tuple[float, ...]]:
    """Kind and numbers of a strategy's name: top-2 is ("top", (2,)).

    Without `num_experts` any k is in range. Raises ValueError, which lists the forms.
    """
    for kind, form in _strategy_forms():
        if match := re.fullmatch(form.pattern, name):
            numbers = tuple(form.number(text) for text in match.groups() if text is not None)
            if form.fits(num_experts or math.inf, *numbers):
                return kind, numbers
    mixture, most = (f" for {num_experts} experts", f" to {num_experts}") if num_experts else ("", "")
    *first, last = (form.words.format(most=most) for _, form in _strategy_forms())
    raise ValueError(f"unknown strategy {name!r:.60}{mixture}: use {', '.join(first)}, {last}")


def parse_time_grid(name: str) -> tuple[str, float]:
    """Kind and shift of a time grid's name: shifted-3 is ("shifted", 3.0), uniform is ("uniform", 1.0).

    Raises ValueError, which lists the forms.
    """
    if name in ("uniform", "cosine"):
        return name, 1.0
    if (match := re.fullmatch(f"shifted-{NUMBER}", name)) and float(match[1]) > 0:
        return "shifted", float(match[1])
    raise ValueError(f"unknown times {name!r:.60}: use uniform, cosine or shifted-S with a number S above 0")
