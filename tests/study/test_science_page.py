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


def test_losses_and_flops_are_over_the_first_monoliths_of_the_same_seed(page: ModuleType) -> None:
    """Those of arms that have any, on the seeds that have the arm; other fields are compared as distances are."""
    distances = {seed: {"base": {"monolith": 1.0, "once": 0.5}, "other": {"monolith": 1.0}} for seed in range(2)}
    measured = study(page, distances, seeds={"choosing": [], "reported": [0, 1]})
    for seed, (own, other) in enumerate([([1.0, 4.0], [2.0, 2.0]), ([3.0, 1.0], [1.0, 4.0])]):
        base = measured.measured["seeds"][str(seed)]["base"]
        base["losses"] = {
            name: {"loss": sum(by_t), "by_t": by_t} for name, by_t in (("full", own), ("monolith", other))
        }
        base["flops"] = {"experts/000": 3.0, "experts/001": 4.0, "router": 1.0, "monolith": 7.0 + seed}
        base["candidates"]["once"]["kid"] = 2.0 + seed
        base["candidates"]["monolith"]["kid"] = 4.0
    assert measured.loss("base/full").mean == pytest.approx(math.sqrt(5 / 4 * 4 / 5))
    assert measured.loss_by_noise("base/full") == pytest.approx([(0.5 + 3) / 2, (2 + 0.25) / 2])
    assert measured.loss("base/once") is None and measured.loss("other/monolith") is None
    assert measured.flops("base", "experts") == pytest.approx(1.0)
    assert measured.flops("base", "router") == pytest.approx(1 / 7)
    assert measured.ratio("base/once", field="kid").mean == pytest.approx(math.sqrt(0.5 * 0.75))


def test_what_an_arm_has_beside_its_candidates_is_of_reported_seeds_that_have_it(page: ModuleType) -> None:
    distances = {seed: {"base": {"monolith": 1.0}} | ({"pairs": {}} if seed else {}) for seed in range(3)}
    measured = study(page, distances, seeds={"choosing": [2], "reported": [0, 1]})
    for seed, alike in ((1, 0.8), (2, 0.9)):
        measured.measured["seeds"][f"{seed}"]["pairs"]["alike"] = {"full": alike}
    assert measured.others("pairs", "alike") == [{"full": 0.8}]


def test_the_best_strategy_is_chosen_on_the_seeds_for_choosing(page: ModuleType) -> None:
    distances = {
        0: {"base": {"monolith": 1.0, "once": 0.9, "full": 0.1}},
        100: {"base": {"monolith": 1.0, "once": 0.5, "full": 0.7}},
    }
    measured = study(page, distances, seeds={"choosing": [100], "reported": [0]})
    assert measured.best == "once"
    assert measured.ratio("base/once").mean == pytest.approx(0.9)


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


def test_how_much_sooner_a_longer_training_is_as_good_as_a_longer_monolith(page: ModuleType) -> None:
    arms = {"base": {"monolith": 9.0, "once": 4.0}, "long": {"monolith": 2.0, "once": 1.0}}
    more = {"base": {"monolith": 9.0, "once": 4.0}}
    measured = study(page, {0: arms, 1: more}, seeds={"choosing": [], "reported": [0, 1]})
    ahead = measured.sooner_by({400: "long/once", 100: "base/once"}, "long/monolith")
    assert ahead.ratio and ahead.ratio.mean == pytest.approx(400 / 250), "half of the way, by the logarithms' line"
    assert ahead.count == 1, "seeds that have the longer one"
