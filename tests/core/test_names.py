"""The one table of names: each is implemented, and nothing is that has no name."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from ddm_ray.config import SamplingSettings, load_recipe
from ddm_ray.core import flow, names, routing, solvers
from ddm_ray.errors import ConfigError, SamplingError

EVEN = """
from dataclasses import dataclass

from ddm_ray.core.names import NUMBER, StrategyForm
from ddm_ray.core.routing import Strategy


@dataclass(frozen=True)
class Even(Strategy):
    share: float = 1.0

    def route(self, probs_BK, before_BK, uniforms_BK):
        return probs_BK * 0 + self.share / probs_BK.shape[1]


EVEN = StrategyForm(f"even(?:-{NUMBER})?", "even-S", "even-1", f"{__name__}:Even", lambda K, share=1.0: share == 1)
"""
Install = Callable[[str, str], None]


def test_every_name_is_implemented() -> None:
    assert flow.PATHS.keys() == set(get_args(names.PathName))
    assert solvers.SOLVERS.keys() == set(get_args(solvers.SolverName))
    for form in names.STRATEGIES.values():
        assert isinstance(routing.parse_strategy(form.example, 8), routing.Strategy)


def test_a_number_of_too_many_digits_is_no_name() -> None:
    """Python refuses to read integers of more than 4,300 digits, and floats of as many are infinite."""
    for parse, name in (
        (names.parse_strategy_name, "top-" + "9" * 5000),
        (names.parse_strategy_name, "nucleus-0.9-" + "9" * 5000),
        (names.parse_strategy_name, "sample-" + "1" * 5000),
        # In float32 they would be 0, and no expert would have a weight.
        (names.parse_strategy_name, "nucleus-0.9-0." + "0" * 39 + "1"),
        (names.parse_strategy_name, "nucleus-0." + "0" * 45 + "1"),
        (names.parse_time_grid, "shifted-" + "9" * 5000),
    ):
        with pytest.raises(ValueError, match="unknown") as refused:
            parse(name)
        assert len(str(refused.value)) < 400


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package of one module that registers strategies, as pip does: its code, and its metadata beside it."""

    def add(entries: str, code: str) -> None:
        metadata = tmp_path / "even_of_mine-1.0.dist-info"
        metadata.mkdir()
        (tmp_path / "even_of_mine.py").write_text(code)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: even-of-mine\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[ddm_ray.strategies]\n{entries}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "even_of_mine", raising=False)

    names.strategies_of_packages.cache_clear()
    yield add
    names.strategies_of_packages.cache_clear()


def test_a_package_adds_a_strategy_that_is_known_like_the_others(install: Install) -> None:
    install("even = even_of_mine:EVEN", EVEN)
    assert type(routing.parse_strategy("even", 3)).__name__ == "Even"
    assert routing.parse_strategy("even-1", 3) == routing.parse_strategy("even-1.0", 3)
    assert SamplingSettings(strategy="even").strategy == "even"
    assert load_recipe("tiny", ("evaluate.strategies=[once,even]",)).evaluate.strategies == ("once", "even")
    assert "even" not in names.STRATEGIES, "the table is of what ships"
    with pytest.raises(SamplingError, match=r"unknown strategy 'even-2' for 3 experts: use once, .*, even-S$"):
        routing.parse_strategy("even-2", 3)
    with pytest.raises(ConfigError, match="holds experts along"):
        load_recipe("tiny", ("student.teacher=even",))


@pytest.mark.parametrize(
    ("entries", "code", "words"),
    [
        ("even = even_of_mine:EVEN", "import no_such_module", "can't be imported .*no_such_module.*; mend it"),
        ("even = even_of_mine:Even", EVEN, "isn't a StrategyForm; mend it, or uninstall it$"),
        ("full = even_of_mine:EVEN", EVEN, "has a name that is taken; uninstall the package$"),
    ],
)
def test_a_package_with_a_broken_strategy_is_named(install: Install, entries: str, code: str, words: str) -> None:
    install(entries, code)
    with pytest.raises(SamplingError, match=f"^strategy .* of the package even-of-mine, {words}"):
        routing.parse_strategy("even", 3)
    assert routing.parse_strategy("full", 3) == routing.Full()
