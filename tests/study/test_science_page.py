"""Statistics of the science: ratios, intervals, the best strategy, and how much sooner the mixture is as good."""

import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats


@pytest.fixture
def page(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("science_page")


def study(page: ModuleType, distances: Mapping[int, Mapping[str, Mapping[str, float]]], **plan: Any) -> Any:
    """A study of these distances, by seed, arm and candidate."""
    seeds = {
        str(seed): {
            arm: {"candidates": {name: {"frechet": distance} for name, distance in names.items()}}
            for arm, names in arms.items()
        }
        for seed, arms in distances.items()
    }
    fields = {"strategies": ["once", "full"], "steps": 80, "milestones": 4, "against": "base/monolith"}
    arms = {"base": {"kind": "run", "of": "base"}, "steps": {"kind": "steps", "of": "base"}}
    return page.Study({"plan": {**fields, "arms": arms, **plan}, "seeds": seeds})


def test_a_ratio_and_its_interval_are_of_pairs_by_their_logarithms(page: ModuleType) -> None:
    monolith, once = np.array([1.0, 3.0, 0.5]), np.array([0.5, 2.1, 0.2])
    distances = {
        seed: {"base": {"monolith": monolith[seed], "once": once[seed]}, **({"told": {"told": 1.0}} if seed else {})}
        for seed in range(3)
    }
    measured = study(page, distances, seeds={"choosing": [], "reported": [0, 1, 2]})
    ratio, logs = measured.ratio("base/once"), np.log(once / monolith)
    low, high = stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs))
    assert (ratio.mean, ratio.low, ratio.high, ratio.count) == pytest.approx(
        (math.exp(logs.mean()), math.exp(low), math.exp(high), 3)
    )
    assert str(ratio).startswith(f"{math.exp(logs.mean()):.2f} (")
    assert measured.ratio("told/told").count == 2, "of the seeds that have both"
    assert str(page.Ratio.of([0.5])) == "0.50 (one seed)"
    assert str(page.Ratio(1.05, 1.004, 1.1, 3)) == "1.05 (1.004 to 1.10, 3 seeds)"  # 1.00 would tell no side
    assert str(page.Ratio(1.05, 0.99996, 1.1, 3)) == "1.05 (0.99996 to 1.10, 3 seeds)"
    assert str(page.Ratio.of([1.0, 1.0])) == "1.00 (1.00 to 1.00, 2 seeds)"


@pytest.mark.parametrize(
    ("distances", "sooner"),
    [
        pytest.param([8.0, 4.0, 2.0, 1.0], 80 / 50, id="between two milestones, by the logarithms' line"),
        pytest.param([1.0, 0.5, 0.5, 0.5], 4.0, id="by the first one"),
        pytest.param([9.0, 8.0, 7.0, 6.0], None, id="never"),
        pytest.param([1.0, 4.0, 2.0, 1.0], 80 / 50, id="to stay so"),
        pytest.param([1.0, 1.0, 1.0, 4.0], None, id="not to the end"),
    ],
)
def test_how_much_sooner_the_mixture_is_as_good(page: ModuleType, distances: list[float], sooner: float | None) -> None:
    goal = 2**1.5
    *earlier, last = distances
    arms = {
        "base": {"monolith": goal, "once": last},
        "steps": {f"once@{20 * place}": distance for place, distance in enumerate(earlier, 1)},
    }
    measured = study(page, {0: arms}, seeds={"choosing": [], "reported": [0]})
    ahead = measured.sooner("once")
    assert (ahead.ratio and ahead.ratio.mean) == (pytest.approx(sooner) if sooner else None)
    assert (ahead.reached, ahead.count) == (int(sooner is not None), 1)
    assert str(ahead).startswith("not by all: 0 of 1 seeds" if sooner is None else f"{sooner:.2f}")
